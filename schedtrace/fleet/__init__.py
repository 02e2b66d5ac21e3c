"""Analysis of many engines: a summary of each engine's trace, and a report on how the engines differ."""
