"""Passes that insert recomputation, offload and copies, and let values share static buffers."""
