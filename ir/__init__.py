"""The program, its layouts, the hardware and the plan: what planner and codegen share."""
