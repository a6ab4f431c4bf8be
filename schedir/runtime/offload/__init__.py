"""Memory of the host and the disk: offloaded activations and optimizer states."""
