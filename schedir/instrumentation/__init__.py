"""Mark the instructions of other trainers as profiler ranges."""
