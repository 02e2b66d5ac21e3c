"""Explanations of a step or a request: ``step.py`` and ``request.py`` are the entries."""
