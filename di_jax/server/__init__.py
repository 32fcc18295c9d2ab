"""The HTTP service over the engine."""
