"""Choose the Triton kernel or the torch reference of an operation."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

from torch import Tensor

from schedir.errors import UsageError

BACKEND_VARIABLE = "SCHEDIR_KERNELS"


@cache
def has_triton() -> bool:
    """Return whether Triton is installed, without importing it."""
    return find_spec("triton") is not None


def uses_triton(tensor: Tensor) -> bool:
    """Return whether Triton kernels run for a tensor.

    Triton kernels run for a tensor on a GPU if Triton is installed. The environment variable
    SCHEDIR_KERNELS=reference disables the kernels.

    Args:
        tensor: The tensor.

    Raises:
        UsageError: SCHEDIR_KERNELS is neither `auto` nor `reference`.
    """
    wish = os.environ.get(BACKEND_VARIABLE, "auto")
    if wish not in ("auto", "reference"):
        raise UsageError(
            f"{BACKEND_VARIABLE} must be 'auto' or 'reference', not {wish!r}",
            hint=f"unset {BACKEND_VARIABLE}",
        )
    return tensor.is_cuda and wish == "auto" and has_triton()
