"""Vocabulary of traces, causes, findings and comparisons; data only."""
