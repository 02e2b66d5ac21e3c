"""Figures, findings and verdicts from a timeline. Pure functions; no module here prints or reads files."""
