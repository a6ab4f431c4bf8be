"""Run the module of a stage: split backward, recomputation, random numbers and buffers."""
