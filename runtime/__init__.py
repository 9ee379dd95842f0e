"""Runs emitted programs: the mesh and its collectives, pipeline schedules, the train step."""
