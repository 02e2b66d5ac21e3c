"""``schedtrace watch``: a view of a running engine."""
