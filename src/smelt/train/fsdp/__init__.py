"""Scheduling of sharded data parallel (FSDP2): a plan from sizes, times, link and memory, and how it turns out."""
