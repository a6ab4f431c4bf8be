"""The tensors that pass between stages: their shapes, dtypes and bytes."""
