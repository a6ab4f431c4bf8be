"""Times of instructions, bytes of values, and a cluster that implies both."""
