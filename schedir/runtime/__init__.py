"""Running programs: stages, the split backward pass, transports, the executor."""

from schedir.runtime.splittable import check_split, register_split, split_linears

__all__ = ["check_split", "register_split", "split_linears"]
