"""Reading of run folders into checked Polars frames. It works without vLLM."""
