"""The engine on a cache in which clusters of heads keep different numbers of tokens (Tangram)."""
