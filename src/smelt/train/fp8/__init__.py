"""Training with FP8 GEMMs: scaled ones as on today's GPUs (`scaled`), and chunk-based accumulation (`chunked`)."""
