"""Move tensors between ranks: processes, GPUs, or virtual ranks of one process."""
