"""Longest paths of the dependency graph, which give the earliest start of each instruction."""
