"""The life of one request: ``life.py`` is the way in."""
