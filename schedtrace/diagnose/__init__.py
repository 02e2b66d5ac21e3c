"""Frames to facts: metrics, findings, comparison. Pure functions; nothing is printed here."""
