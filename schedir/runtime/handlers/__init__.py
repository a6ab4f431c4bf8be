"""Handlers: for each opcode, a function that prepares an instruction and returns its `Call`.

A `Call` has two functions. One waits for the inputs of the instruction, and the other runs it.
"""
