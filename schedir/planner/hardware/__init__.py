"""Clusters and training software: presets, fits to measurements, and errors of predictions."""
