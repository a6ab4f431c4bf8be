"""Traces of real runs, as profilers leave them, read as programs and Timelines."""

from schedir.traces.trace_import import Imported, read_run

__all__ = ["Imported", "read_run"]
