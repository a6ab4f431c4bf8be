"""A schedule in, a checked program out: the passes in their order, and the proof."""
