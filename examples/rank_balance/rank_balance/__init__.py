"""A scheduler for vLLM of one's own: no rank admits more while another one is full."""
