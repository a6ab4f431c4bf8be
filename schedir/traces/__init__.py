"""What real runs leave behind: traces of profilers, and dumps of runs that stand still."""
