"""vLLM's own scheduler and KV cache manager without a model: what would it decide?

``Driver`` works it call by call, ``Simulation`` in virtual time; ``docs/simulate.md`` is their page.
"""

from schedtrace.simulate.no_gpu import stand_in

stand_in()

from schedtrace.simulate.clock import VirtualClock  # noqa: E402  # vLLM must know the platform first
from schedtrace.simulate.driver import Driver  # noqa: E402  # vLLM must know the platform first
from schedtrace.simulate.simulation import Simulation  # noqa: E402  # vLLM must know the platform first

__all__ = ["Driver", "Simulation", "VirtualClock"]
