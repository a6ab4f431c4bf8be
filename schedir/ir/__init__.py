"""The intermediate representation: programs, instructions, values, shapes, costs and sizes."""
