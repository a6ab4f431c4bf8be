"""Search for the shortest schedule within a memory limit, and compute lower bounds.

A search solves a `SchedulingProblem`: times and sizes as plain numbers per stage and rank. Its
solution is an `Order`: for each rank the sequence of its tasks. A task is one F, I or W of a
microbatch on a stage. All microbatches have equal times and sizes, so a rank can process them in
ascending order, and an order needs no microbatch numbers.
"""
