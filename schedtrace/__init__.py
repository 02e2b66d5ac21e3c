"""schedtrace: why did vLLM's scheduler not schedule that request?"""

__version__ = "0.1.0"
