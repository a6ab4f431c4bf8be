"""Services: the state of one feature on a rank, created by the first handler that needs it."""
