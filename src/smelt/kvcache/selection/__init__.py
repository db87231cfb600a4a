"""Sparse page attention: no page is evicted, and each decode step attends to the pages its queries score highest."""
