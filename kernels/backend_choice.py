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
    """Whether triton is installed; it is not imported to find out."""
    return find_spec("triton") is not None


def uses_triton(tensor: Tensor) -> bool:
    """Whether kernels take this tensor: it is on a GPU, and triton is there.

    SCHEDIR_KERNELS=reference keeps to plain torch.  Raises UsageError for any other value of
    it than that or `auto`.
    """
    wish = os.environ.get(BACKEND_VARIABLE, "auto")
    if wish not in ("auto", "reference"):
        raise UsageError(f"{BACKEND_VARIABLE} is {wish!r}", hint="auto or reference")
    return tensor.is_cuda and wish == "auto" and has_triton()
