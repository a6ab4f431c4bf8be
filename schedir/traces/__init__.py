"""Import traces of real runs as programs and timelines."""

from schedir.traces.trace_import import ImportedRun, read_run

__all__ = ["ImportedRun", "read_run"]
