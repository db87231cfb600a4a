"""lm-eval's tasks on a Smelt model: task files, the model adapter, and results per item."""
