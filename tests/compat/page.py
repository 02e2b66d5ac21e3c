"""Writes ``docs/compatibility.md`` from ``results.json``."""
