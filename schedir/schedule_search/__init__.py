"""Search for the shortest schedule within a memory limit, and compute lower bounds.

What is searched is a SchedulingProblem: numbers of stages and ranks.  An Order is what each rank
does in turn; microbatches are alike, so it does each kind of work of a stage in ascending order,
and an order needs no microbatch numbers.
"""
