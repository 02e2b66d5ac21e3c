"""vLLM's own scheduler and KV cache manager without a model: what would it decide?

``Driver`` is the public part; ``docs/simulate.md`` is its page.
"""

from schedtrace.simulate.driver import Driver

__all__ = ["Driver"]
