"""Engines of vLLM: those that ``schedtrace run`` starts, and those that already run on this machine.

The engine of a run lives in a child process (``child``), so that its log, its crashes and its signals are
separate from the command's; ``supervise`` is the parent's half and imports no vLLM.
"""
