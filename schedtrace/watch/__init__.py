"""``schedtrace watch``: a run while it goes on."""
