"""Refuse models and parameters that would give wrong results, and ranks that do not agree."""
