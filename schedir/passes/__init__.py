"""Passes: pure functions from a program to a program that lower a draft.

`compile` runs the passes of `pass_registry.LOWERING_PASSES` in order. These passes belong to five
phases:

- "draft": change the compute of a draft (frozen stages, segments, recomputation, order).
- "messages": add the sends and receives, and the collectives of values between stages or segments.
- "ends": add the gradient reductions, the optimizer step, and other instructions at the end of an
  update.
- "memory": add offloads, and limit the numbers of buffers of values that stay on a rank.
- "better": change the order of transfers, or reduce the numbers of buffers.
"""
