"""OpenTelemetry export over OTLP: an engine's metrics, and the states of sampled requests as spans."""
