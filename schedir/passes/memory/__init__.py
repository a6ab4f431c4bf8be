"""Passes that offload, recompute and copy values, and that share static buffers."""
