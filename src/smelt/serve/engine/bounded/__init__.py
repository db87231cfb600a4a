"""The engine with a bounded KV cache: a request's cache is compressed when it is full (InfiniPot)."""
