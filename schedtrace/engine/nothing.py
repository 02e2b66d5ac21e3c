"""Empty script that an engine gets in place of one that nobody waits for (``unprepared.py``)."""
