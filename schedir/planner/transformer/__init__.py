"""Describe a transformer: its shape, and the operations, times and bytes of its layers."""
