"""vLLM's own scheduler and KV cache manager without a model: what would it decide?

``Driver`` works it call by call, ``Simulation`` in virtual time; ``docs/simulate.md`` is their page.
"""

import os

from vllm.platforms import resolve_current_platform_cls_qualname

# A GPU build finds no platform where there is no GPU, and configures nothing then. Nothing is computed here.
if resolve_current_platform_cls_qualname().endswith(".UnspecifiedPlatform"):
    os.environ["VLLM_TARGET_DEVICE"] = "cpu"

from schedtrace.simulate.clock import VirtualClock  # vLLM must know the platform first
from schedtrace.simulate.driver import Driver  # vLLM must know the platform first
from schedtrace.simulate.simulation import Simulation  # vLLM must know the platform first

__all__ = ["Driver", "Simulation", "VirtualClock"]
