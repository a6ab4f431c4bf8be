"""Tensor-parallel layers after Megatron-LM (Shoeybi et al., arXiv 1909.08053)."""
