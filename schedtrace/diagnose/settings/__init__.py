"""The settings that an engine ran with: values, origins, and what they did in the run."""
