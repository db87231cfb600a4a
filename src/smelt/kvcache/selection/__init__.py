"""Page selection without eviction: every page is kept, and each step attends to those that its queries point to."""
