"""Compute the earliest start of every instruction: the longest paths of the dependency graph."""
