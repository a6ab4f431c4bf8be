"""Running programs: stages, the split backward pass, transports, the executor."""

from schedir.runtime.split_layers import check_split, register_split, split_layers

__all__ = ["check_split", "register_split", "split_layers"]
