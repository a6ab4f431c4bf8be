"""The configuration file of a training run: its sections, its settings and their types."""
