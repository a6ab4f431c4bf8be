"""Offload activations and optimizer states to host memory and to the disk."""
