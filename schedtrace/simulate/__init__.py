"""vLLM's own scheduler and KV cache manager without a model: what would it decide?

``Driver`` works it call by call, ``Simulation`` in virtual time; ``docs/simulate.md`` is their page.
"""

from schedtrace.simulate.clock import VirtualClock
from schedtrace.simulate.driver import Driver
from schedtrace.simulate.simulation import Simulation

__all__ = ["Driver", "Simulation", "VirtualClock"]
