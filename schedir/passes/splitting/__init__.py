"""Passes that change the compute of a draft: segments, chunks, its order, and frozen stages."""
