"""What moves tensors between ranks."""
