"""One step or one request explained: ``step.py`` and ``request.py`` are the entries."""
