"""Passes that recompute, offload and copy values, and that share static buffers."""
