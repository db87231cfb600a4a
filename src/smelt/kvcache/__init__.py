"""KV cache compression: eviction, sparse page attention and bounded streaming caches."""
