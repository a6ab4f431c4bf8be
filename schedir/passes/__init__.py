"""Passes: pure functions from Program to Program.

`compile` runs them in order: transfers, scatter_gather, reductions, optimizer_step.  Those of
`overlap` come after it, for whoever wants them.
"""
