"""Many engines, one answer: a summary of each engine's trace, and a report of how the engines differ."""
