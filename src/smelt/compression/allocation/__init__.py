"""Budget allocation: which units of which layer stay under a budget of parameters, MACs, bytes or latency."""
