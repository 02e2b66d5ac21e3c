"""Live view of running engines, for ``schedtrace watch``."""
