"""Compile a schedule into a checked program."""
