"""Metrics of a recorded engine, computed on the writer's thread: totals, their series, and where they appear."""
