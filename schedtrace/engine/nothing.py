"""Empty script for an engine, in place of one that no process waits for (``unprepared.py``)."""
