"""What runs a program: an executor for each rank, split backwards, what is kept and measured.

What users need is here by name, and each is loaded where it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

from schedir.extras import require

require("torch", "schedir.runtime")  # the imports below would fail without a hint

# Loaded at once: its module has the same name, and would else take the place of the function.
from schedir.runtime.reference import reference  # noqa: E402

if TYPE_CHECKING:
    from schedir.runtime.boundary import Boundary
    from schedir.runtime.executor import Executor
    from schedir.runtime.inprocess import InProcess
    from schedir.runtime.per_microbatch import PerMicrobatch
    from schedir.runtime.sizes import boundaries_of, sizes_of
    from schedir.runtime.splittable import check_split, register_split, split_linears
    from schedir.transports.nccl import nccl
    from schedir.transports.processes import Gloo
    from schedir.transports.shared import Shared

_HOME: Final = {
    "Boundary": "runtime.boundary",
    "Executor": "runtime.executor",
    "Gloo": "transports.processes",
    "InProcess": "runtime.inprocess",
    "PerMicrobatch": "runtime.per_microbatch",
    "Shared": "transports.shared",
    "boundaries_of": "runtime.sizes",
    "check_split": "runtime.splittable",
    "nccl": "transports.nccl",
    "register_split": "runtime.splittable",
    "sizes_of": "runtime.sizes",
    "split_linears": "runtime.splittable",
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
