"""Start of vLLM for ``schedtrace run``: workloads, trials, engine arguments, results.

The engine lives in a child process (``child``), so that its log, its crashes and its signals are separate
from the command's; ``supervise`` is the parent's half and imports no vLLM.
"""
