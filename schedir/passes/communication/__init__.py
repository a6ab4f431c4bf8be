"""Passes that insert messages, collectives and optimizer steps, or move them."""
