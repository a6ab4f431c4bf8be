"""The runtime: executors that run programs with torch.

What users need is here by name, and each is loaded where it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

from schedir.extras import require

require("torch", "schedir.runtime")  # the imports below would fail without a hint

if TYPE_CHECKING:
    from schedir.runtime.autograd.splittable_layers import (
        check_split,
        register_split,
        split_linears,
    )
    from schedir.runtime.boundaries.boundary import Boundary
    from schedir.runtime.boundaries.per_microbatch import PerMicrobatch
    from schedir.runtime.boundaries.size_measurement import boundaries_of, sizes_of
    from schedir.runtime.executor import Executor
    from schedir.runtime.in_process import InProcess
    from schedir.runtime.sequential_reference import reference
    from schedir.transports.gloo import Gloo
    from schedir.transports.nccl import nccl
    from schedir.transports.shared_memory import Shared

_HOME: Final = {
    "Boundary": "runtime.boundaries.boundary",
    "Executor": "runtime.executor",
    "Gloo": "transports.gloo",
    "InProcess": "runtime.in_process",
    "PerMicrobatch": "runtime.boundaries.per_microbatch",
    "Shared": "transports.shared_memory",
    "boundaries_of": "runtime.boundaries.size_measurement",
    "check_split": "runtime.autograd.splittable_layers",
    "nccl": "transports.nccl",
    "reference": "runtime.sequential_reference",
    "register_split": "runtime.autograd.splittable_layers",
    "sizes_of": "runtime.boundaries.size_measurement",
    "split_linears": "runtime.autograd.splittable_layers",
}
__all__ = [
    "Boundary",
    "Executor",
    "Gloo",
    "InProcess",
    "PerMicrobatch",
    "Shared",
    "boundaries_of",
    "check_split",
    "nccl",
    "reference",
    "register_split",
    "sizes_of",
    "split_linears",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"schedir.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
