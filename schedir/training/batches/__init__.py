"""The batches of a training run: their samples, their order, and their prefetch."""
