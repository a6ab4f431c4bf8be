"""Train a model from a configuration: processes, data, steps, evaluation and checkpoints."""
