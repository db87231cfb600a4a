"""Gradients of pipeline stages, between the replicas of each stage: densities from slack, sent layer by layer."""
