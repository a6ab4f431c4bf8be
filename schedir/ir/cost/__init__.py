"""Times of instructions, bytes of values, and a cluster from which times are computed."""
