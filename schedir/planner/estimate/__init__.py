"""Estimate the step time of a parallel plan, by formulas and by simulation."""
