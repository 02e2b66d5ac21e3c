"""One step told: ``story.py`` is the way in."""
