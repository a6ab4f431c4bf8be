"""Compute the bytes that each rank holds, the lifetimes of values, and their static buffers."""
