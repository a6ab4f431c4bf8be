"""Figures that matplotlib draws."""
