"""Compile schedules; lower existing programs again; recognize the schedule of a program."""
