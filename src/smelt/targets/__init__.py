"""Hardware targets: operators, the devices that run them, and latency tables."""
