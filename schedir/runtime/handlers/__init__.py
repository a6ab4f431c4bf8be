"""Handlers: for each opcode, a function that prepares an instruction and returns its `Call`.

A `Call` contains the functions that wait for the inputs of the instruction and that run it.
"""
