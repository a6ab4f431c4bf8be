"""Passes that split stages into segments and microbatches into chunks."""
