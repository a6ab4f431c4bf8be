"""Times of instructions, bytes of values, and a cluster that gives both."""
