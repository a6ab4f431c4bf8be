"""Executors that run programs with torch.

Each public name is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

from schedir.extras import require_package
from schedir.retired_names import make_attribute_error

# Without this check the imports below would fail without a hint on how to install torch.
require_package("torch", "schedir.runtime")

if TYPE_CHECKING:
    from schedir.runtime.autograd.splittable_layers import (
        check_splittable_layer,
        make_backward_splittable,
        register_splittable_layer,
    )
    from schedir.runtime.boundaries.boundary import Boundary
    from schedir.runtime.boundaries.microbatch_boundaries import PerMicrobatchBoundary
    from schedir.runtime.boundaries.size_measurement import infer_boundaries, measure_sizes
    from schedir.runtime.executor import Executor
    from schedir.runtime.executor_options import ExecutionOptions, GradientOptions
    from schedir.runtime.in_process import InProcessExecutor
    from schedir.runtime.sequential_reference import run_sequential
    from schedir.transports.gloo import GlooTransport
    from schedir.transports.nccl import nccl_transport
    from schedir.transports.shared_memory import SharedMemoryTransport

_HOME: Final = {
    "Boundary": "runtime.boundaries.boundary",
    "ExecutionOptions": "runtime.executor_options",
    "Executor": "runtime.executor",
    "GlooTransport": "transports.gloo",
    "GradientOptions": "runtime.executor_options",
    "InProcessExecutor": "runtime.in_process",
    "PerMicrobatchBoundary": "runtime.boundaries.microbatch_boundaries",
    "SharedMemoryTransport": "transports.shared_memory",
    "infer_boundaries": "runtime.boundaries.size_measurement",
    "check_splittable_layer": "runtime.autograd.splittable_layers",
    "nccl_transport": "transports.nccl",
    "run_sequential": "runtime.sequential_reference",
    "register_splittable_layer": "runtime.autograd.splittable_layers",
    "measure_sizes": "runtime.boundaries.size_measurement",
    "make_backward_splittable": "runtime.autograd.splittable_layers",
}
__all__ = [
    "Boundary",
    "ExecutionOptions",
    "Executor",
    "GlooTransport",
    "GradientOptions",
    "InProcessExecutor",
    "PerMicrobatchBoundary",
    "SharedMemoryTransport",
    "check_splittable_layer",
    "infer_boundaries",
    "make_backward_splittable",
    "measure_sizes",
    "nccl_transport",
    "register_splittable_layer",
    "run_sequential",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise make_attribute_error(__name__, name)
    return getattr(import_module(f"schedir.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
