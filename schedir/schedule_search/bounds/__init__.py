"""Lower bounds on the time of every schedule of a problem."""
