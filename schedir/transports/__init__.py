"""Transports that move tensors between ranks."""
