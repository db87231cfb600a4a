"""Measure the link and choose the gradient compressor that pays."""
