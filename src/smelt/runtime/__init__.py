"""Networks compiled to run: the decoder's structure, its CPU program and its fused GPU form. No requests here."""
