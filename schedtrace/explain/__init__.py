"""Explanations of a step or a request; the entry points are in ``step.py`` and ``request.py``."""
