"""Two runs compared: ``compare.py`` is the way in."""
