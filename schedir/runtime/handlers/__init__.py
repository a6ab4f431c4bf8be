"""Handlers: functions that return the call of an instruction, one for each opcode."""
