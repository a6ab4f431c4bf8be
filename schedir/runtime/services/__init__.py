"""Services. Each has the state of one feature on a rank, and is created at its first use."""
