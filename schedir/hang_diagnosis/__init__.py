"""Diagnose a job that hangs, from flight-recorder dumps and black boxes."""
