"""Checks of models, parameters and ranks that refuse steps with wrong results."""
