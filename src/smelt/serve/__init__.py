"""Serving: the engine that runs many requests at once, and the server in front of it."""
