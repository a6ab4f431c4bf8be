"""Run the module of a stage: split backwards, recomputation, random numbers, buffers."""
