"""What real runs leave behind: traces of profilers, and dumps of runs that stand still."""

from schedir.traces.run import Imported, read_run

__all__ = ["Imported", "read_run"]
