"""Passes: pure functions from Program to Program that lower a draft.

`compile` runs them in order: transfers, scatter_gather, reductions, optimizer_step; then, for
whoever wants them, those of `overlap`, and last `share_slots`.
"""
