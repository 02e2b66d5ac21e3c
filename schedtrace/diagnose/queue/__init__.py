"""The waiting queue, rebuilt from the trace: ``waits.py`` is the way in."""
