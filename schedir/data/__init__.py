"""Data: text and tokens of files, as windows in an order that needs no memory.  Needs no torch."""
