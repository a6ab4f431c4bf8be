"""Figures that are drawn with matplotlib."""
