"""The tables of transports and devices. This module does not import torch.

To add a transport, add a subclass of `ProcessTransport` and a row of `_TRANSPORTS`. A new kind of
device also needs a row of `_DEVICES`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from schedir.analysis.progress_models import ProgressModel
from schedir.ir.program import Program

if TYPE_CHECKING:
    from schedir.transports.process_transport import ProcessTransport

Device = Literal["cpu", "cuda"]
AUTO: Final = "auto"  # selects the first of a device's transports that supports the programs


class DeviceRow(NamedTuple):
    """A kind of device.

    A path names a module of this package and a function in it, as "module:function".

    Attributes:
        device: The name of the device.
        require_path: The path of a function that takes a number of processes. The function raises
            UsageError if this machine lacks devices for that number of processes.
        initialise_path: The path of a function `initialise(timeout, **init_args)` that initialises
            torch.distributed.
        buffer_sharing: The default of `buffer_sharing` for programs. On a CPU it is "none", because
            messages through shared memory have a slot each.
    """

    device: Device
    require_path: str
    initialise_path: str
    buffer_sharing: Literal["none", "latency_preserving"]


class TransportRow(NamedTuple):
    """A transport between processes.

    Attributes:
        name: The name, as in the configuration of a training run.
        device: The name of the device.
        progress_model: The progress model of the transport.
        blocking_hosts: See `Transport`.
        class_path: The module of this package and the class, as "module:class". The class is called
            with (program, timeout, device=, max_message_bytes=, extra_programs=).
        doc: A clause of the documentation, which completes a sentence that begins with "messages
            travel".
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

# The fastest transport of each device comes first.
_TRANSPORTS: Final[tuple[TransportRow, ...]] = (
    TransportRow(
        "shared_memory", "cpu", "per_edge", True, "shared_memory:SharedMemoryTransport",
        "through memory that the processes of one machine share (Linux on x86-64), for programs "
        "without shared buffers (`pipeline.buffer_sharing`)",
    ),
    TransportRow(
        "gloo", "cpu", "per_edge", True, "gloo:GlooTransport",
        "by Gloo, on one machine or several",
    ),
    TransportRow(
        "nccl_per_edge", "cuda", "per_edge", True, "nccl:NCCLEdge",
        "by NCCL, with a queue for each pair of a sender and a receiver",
    ),
    TransportRow(
        "nccl_grouped", "cuda", "per_device", True, "nccl:NCCLGrouped",
        "by NCCL, with one queue for all messages, which are sent in groups",
    ),
)  # fmt: skip

DEVICES: Final[dict[str, DeviceRow]] = {row.device: row for row in _DEVICES}
TRANSPORTS: Final[dict[str, TransportRow]] = {row.name: row for row in _TRANSPORTS}


def list_transports(device: str, name: str = AUTO) -> list[TransportRow]:
    """Return the transports with a given name for a device, the fastest first.

    Args:
        device: The name of the device.
        name: The name of the transport. "auto" selects all transports of the device that have the
            progress model of the device's first transport. The program is compiled for that model
            before the transport is chosen.
    """
    device_rows = [row for row in _TRANSPORTS if row.device == device]
    return [
        row
        for row in device_rows
        if row.name == name
        or (name == AUTO and row.progress_model == device_rows[0].progress_model)
    ]


def load_object(object_path: str) -> Any:
    """Import a module of this package, and return an object of it.

    Args:
        object_path: The path in a row, such as "gloo:initialise".
    """
    module, name = object_path.split(":")
    return getattr(import_module(f"schedir.transports.{module}"), name)


def choose_transport(name: str, device: str, *programs: Program) -> type[ProcessTransport]:
    """Return the class of a transport that supports programs.

    All processes must call this, after they called the function of `initialise_path`.

    Args:
        name: The name of the transport. "auto" selects the first transport of the device that
            supports all programs. If no transport supports them, "auto" selects the last transport.
        device: The name of the device.
        *programs: The programs that will run.
    """
    *preferred_rows, last_row = list_transports(device, name)
    for row in preferred_rows:
        transport_class: type[ProcessTransport] = load_object(row.class_path)
        if all([transport_class.supports(program) for program in programs]):
            return transport_class
    last_class: type[ProcessTransport] = load_object(last_row.class_path)
    return last_class
