"""The engine with a per-head KV cache: clusters of heads keep different numbers of tokens (Tangram)."""
