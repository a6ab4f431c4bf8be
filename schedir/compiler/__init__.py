"""Compile schedules into checked programs, lower programs again, and recognize their schedules."""
