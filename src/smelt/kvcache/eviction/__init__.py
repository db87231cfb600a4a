"""KV cache eviction: scorers, per-head budgets, and profiles for serving."""
