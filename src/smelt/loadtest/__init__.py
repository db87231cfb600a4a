"""Load test of any OpenAI-compatible server: latencies, throughput and goodput at a request rate."""
