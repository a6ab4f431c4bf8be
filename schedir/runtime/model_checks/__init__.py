"""Checks of models, parameters and ranks that refuse what a step would compute wrongly."""
