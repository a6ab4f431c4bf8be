"""Dumps of runs that stand still: where each rank stands, and who waits for whom."""
