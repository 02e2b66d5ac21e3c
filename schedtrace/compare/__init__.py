"""Comparison of two runs; ``compare.py`` is the entry point."""
