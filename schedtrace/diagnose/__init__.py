"""Figures, findings and verdicts from a timeline, made by pure functions that print and read nothing."""
