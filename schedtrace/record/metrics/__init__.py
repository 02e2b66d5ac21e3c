"""Metrics of a recorded engine: totals made on the writer's thread, their series, and their export."""
