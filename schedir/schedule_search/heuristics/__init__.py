"""Heuristics that find short schedules: list scheduling, annealing, local search."""
