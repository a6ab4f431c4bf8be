"""Checks that refuse models, parameters and ranks that would give wrong results."""
