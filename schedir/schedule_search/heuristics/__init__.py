"""Find short schedules with heuristics: list scheduling, annealing and local search."""
