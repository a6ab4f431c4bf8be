"""Functions that run the instructions, one for every row of the instruction table."""
