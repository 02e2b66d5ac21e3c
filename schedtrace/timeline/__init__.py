"""One engine's trace as tables of time: where it went, and who held what."""
