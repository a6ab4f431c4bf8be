"""Train a GPT from a configuration: processes, data, steps, evaluation and checkpoints."""
