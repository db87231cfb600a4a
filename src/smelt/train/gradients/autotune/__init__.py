"""`auto`: measure the link and the step, predict each compressor's cost, and choose per bucket."""
