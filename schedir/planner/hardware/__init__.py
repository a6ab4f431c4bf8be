"""Presets of clusters and training software, and the fit of a cluster to measurements."""
