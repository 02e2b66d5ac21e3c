"""Does nothing: given to an engine in place of a script that nobody waits for now (``unprepared.py``)."""
