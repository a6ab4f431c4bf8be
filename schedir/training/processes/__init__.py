"""The processes of a training run: start, rendezvous, watchdog and exit."""
