"""Clusters that users can name, and clusters that are fitted to measurements."""
