"""Traces of real runs, as profilers leave them, read as programs and Timelines."""

from schedir.traces.trace_import import ImportedRun, read_run

__all__ = ["ImportedRun", "read_run"]
