"""OpenTelemetry: an engine's metrics, and the states of sampled requests as spans, sent by OTLP."""
