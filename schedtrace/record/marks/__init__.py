"""Marked copy of ``schedule()``: where its exits are, what leads to each, and what is noted there."""
