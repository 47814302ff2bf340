"""OpenTelemetry traces: one a request, made of its moves when it has ended."""
