"""The language: what a program is, and how it is written down."""
