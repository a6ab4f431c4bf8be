"""Handlers: functions that link the instructions of a stream, one for each opcode."""
