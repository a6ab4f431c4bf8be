"""Transports between virtual ranks of one process."""
