"""Model compression: calibration, pruning, quantization, and the recipes that combine them."""
