"""KV cache eviction: scorers, budget rules for layers and heads, and profiles for serving."""
