"""Batches of a training run."""
