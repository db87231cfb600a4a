"""The trainer: from a YAML file to a run folder with its log, checkpoints and the trained model."""
