"""Empty script, in place of the script for an engine that nobody waits for any more (``unprepared.py``)."""
