"""Readers of run folders: they return checked Polars frames and do not need vLLM."""
