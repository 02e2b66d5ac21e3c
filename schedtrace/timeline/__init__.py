"""Tables of one engine's trace: where time went, and which requests held what."""
