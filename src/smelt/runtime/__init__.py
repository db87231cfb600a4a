"""Compiled execution of a decoder: its structure, the CPU program and the fused GPU path. Knows no requests."""
