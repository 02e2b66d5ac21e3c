"""Run folders to checked Polars frames. Works where vLLM is not installed."""
