"""The passport of an artifact: what is in it, where it came from, and how to check and repeat it."""
