"""Checks that refuse a program: missing work, values used too early, deadlocks."""
