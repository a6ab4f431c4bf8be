"""Checks that refuse incomplete programs, values used before they exist, and deadlocks."""
