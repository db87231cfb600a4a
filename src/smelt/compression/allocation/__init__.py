"""Budget allocation: choose the units to keep in each layer under a budget of parameters, MACs, bytes or latency."""
