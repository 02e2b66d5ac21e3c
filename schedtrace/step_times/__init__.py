"""Step times: fitted to a trace, derived from a model's shape and a GPU, constant, or as recorded.

``docs/simulation.md`` has the formulas and their sources. Nothing here imports vLLM or torch.
"""

from schedtrace.step_times.batch import Batch, StepTimes
from schedtrace.step_times.constants import Constants, HostTimes

__all__ = ["Batch", "Constants", "HostTimes", "StepTimes"]
