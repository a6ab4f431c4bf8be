"""Measurements of a step: timestamps, live memory, progress of a GPU, and the first NaN."""
