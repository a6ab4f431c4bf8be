"""Running programs: stages, the split backward pass, transports, the executor."""

from schedir.runtime.split import split_linears

__all__ = ["split_linears"]
