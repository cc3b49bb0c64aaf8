"""Destinations of the outbox: one module a broker. Nothing is imported before it is needed, so none is required."""
