"""Tensors that pass between stages: their shapes, types and bytes."""
