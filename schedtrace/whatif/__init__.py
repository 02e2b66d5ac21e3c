"""What-if questions: recorded loads replayed under other configurations with vLLM's own scheduler."""
