"""The configuration file of a training run: its sections, settings and their types."""
