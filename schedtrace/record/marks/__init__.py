"""Marked copy of ``schedule()``: the places of its exits, their causes, and what the marks record."""
