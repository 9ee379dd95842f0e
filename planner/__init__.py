"""Decides: sharding, stages, recompute and schedule for a traced model on a cluster."""
