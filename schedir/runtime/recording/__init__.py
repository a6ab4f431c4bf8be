"""Measurements of a step: timestamps, clock offsets, live memory, GPU progress, first NaN."""
