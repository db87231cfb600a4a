"""The training loop: from a YAML file to a run folder with its log, its checkpoints and the trained model."""
