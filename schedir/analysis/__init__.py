"""Analyses of a program: dependencies, critical path, deadlocks and memory."""
