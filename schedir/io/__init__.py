"""Files and terminals: what programs and runs are read from and written to."""
