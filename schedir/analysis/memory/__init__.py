"""Analyses of memory: the bytes of each rank, the lifetimes of values, and static buffers."""
