"""An offloader as others watch it: metrics for Prometheus, spans for OpenTelemetry; both optional."""
