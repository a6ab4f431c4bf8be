"""The instruction set: tables of instructions, values, forms and lanes, and their validation."""
