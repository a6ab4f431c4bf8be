"""The table of transports and devices.  Needs no torch.

A new transport is a row of `TRANSPORTS` and a class that is a `ProcessTransport`; a new kind of
device is a row of `DEVICES` besides.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from schedir.analysis.progress_models import ProgressModel
from schedir.ir.program import Program

if TYPE_CHECKING:
    from schedir.transports.gloo import ProcessTransport

Device = Literal["cpu", "cuda"]
AUTO: Final = "auto"  # the first of a device that fits


class DeviceRow(NamedTuple):
    """Where processes have their tensors.

    `require(processes)` refuses, by UsageError, a machine that does not have the device for so many
    processes; `initialise(timeout, **how)` lets processes know each other.  Both are the name of a
    module of this folder, and of a function in it.  `buffer_sharing` is how programs share slots
    where nobody says it: not on a CPU, where messages through shared memory have one each.
    """

    device: Device
    require_path: str
    initialise_path: str
    buffer_sharing: Literal["none", "latency_preserving"]


class TransportRow(NamedTuple):
    """A transport of processes.

    `progress_model` is its progress model, and `blocking_hosts` whether the instructions after a
    compute wait for it, as in Transport.  `class_path` is the name of a module of this
    folder, and of a class in it that is made of (program, timeout, device=, message=), as
    Processes.  `doc` ends the sentence "messages travel".
    """

    name: str
    device: Device
    progress_model: ProgressModel
    blocking_hosts: bool
    class_path: str
    doc: str


_DEVICES: Final[tuple[DeviceRow, ...]] = (
    DeviceRow("cpu", "gloo:require_cpus", "gloo:initialise", "none"),
    DeviceRow("cuda", "gpu_selection:require_gpus", "nccl:initialise", "latency_preserving"),
)

# Of each device the best first.
_TRANSPORTS: Final[tuple[TransportRow, ...]] = (
    TransportRow(
        "shared_memory", "cpu", "per_edge", True, "shared_memory:SharedMemoryTransport",
        "through memory that the processes of one machine share (a Linux on x86-64), for programs "
        "that share no slots",
    ),
    TransportRow(
        "gloo", "cpu", "per_edge", True, "gloo:GlooTransport",
        "by Gloo, on one machine or several",
    ),
    TransportRow(
        "nccl_per_edge", "cuda", "per_edge", True, "nccl:NCCLEdge",
        "by NCCL, with a queue for each directed edge",
    ),
    TransportRow(
        "nccl_grouped", "cuda", "per_device", True, "nccl:NCCLGrouped",
        "by NCCL, with one queue, in groups",
    ),
)  # fmt: skip

DEVICES: Final[dict[str, DeviceRow]] = {row.device: row for row in _DEVICES}
TRANSPORTS: Final[dict[str, TransportRow]] = {row.name: row for row in _TRANSPORTS}


def list_transports(device: str, name: str = AUTO) -> list[TransportRow]:
    """The transports of a device, the best first: those of that name, or, for "auto", all that
    give the progress model of the first, for which the program is made before it is chosen."""
    own = [row for row in _TRANSPORTS if row.device == device]
    return [
        row
        for row in own
        if row.name == name or (name == AUTO and row.progress_model == own[0].progress_model)
    ]


def load_object(object_path: str) -> Any:
    """What a row names, with its module loaded."""
    module, name = object_path.split(":")
    return getattr(import_module(f"schedir.transports.{module}"), name)


def choose_transport(name: str, device: str, *programs: Program) -> type[ProcessTransport]:
    """The class of the transport of that name; for "auto", of the first that fits all programs, or
    the last.

    All processes must call this, after `initialise_path`.
    """
    *better, last = list_transports(device, name)
    classes: Iterator[type[ProcessTransport]] = (load_object(row.class_path) for row in better)
    fits = (one for one in classes if all([one.supports(program) for program in programs]))
    found: type[ProcessTransport] | None = next(fits, None)
    return found or load_object(last.class_path)
