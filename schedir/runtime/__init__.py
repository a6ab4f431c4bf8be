"""Running programs: stages, the split backward pass, transports, the executor."""
