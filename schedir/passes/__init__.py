"""How a draft becomes a program: passes, which are pure functions from Program to Program.

`compile` runs them in order: transfers, scatter_gather, reductions, optimizer_step; then, for
whoever wants them, those of `overlap`, and last `share_slots`.
"""
