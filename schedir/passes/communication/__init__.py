"""Passes that insert messages, collectives and reductions."""
