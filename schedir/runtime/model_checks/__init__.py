"""Checks of models, parameters and ranks that would give wrong results."""
