"""Run the modules of stages: split backwards, recomputation, random numbers, and module buffers."""
