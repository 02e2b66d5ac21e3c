"""What would be, if: recorded loads on other configurations, with vLLM's scheduler deciding."""
