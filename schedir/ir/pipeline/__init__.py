"""The shape of a pipeline, and the attributes of a program."""
