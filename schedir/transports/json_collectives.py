"""Gather and broadcast plain values between processes, as JSON.

torch's own `all_gather_object` unpickles what peers send, and a pickle may run code.  Here it is
JSON, with a tag for what JSON has not: tuples, dicts whose keys are no text, types of torch, and
the records and named numbers that the receiver says it takes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from schedir.errors import ModelError, describe

MAX_BYTES: Final = 2**28  # bytes that a process may tell
RecordTypes = Sequence[type]  # NamedTuples, dataclasses and Enums


def gather(value: object, group: Any = None, record_types: RecordTypes = ()) -> list[Any]:
    """What each process of a group tells, by rank; all of them call this.

    A value is made of None, numbers, text, lists, tuples, dicts, types of torch, and records of
    these `record_types`.  Raises ModelError for a value that a peer sends and that is none.
    """
    told = gather_bytes(encode_value(value, record_types), group)
    return [decode_value(data, f"process {k}", record_types) for k, data in enumerate(told)]


def gather_bytes(data: bytes, group: Any = None) -> list[bytes]:
    """The bytes of each process of a group, by rank; all of them call this.

    Raises ModelError where one tells too much.
    """
    device, processes = select_exchange_device(group), dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(processes)]
    dist.all_gather(sizes, torch.tensor([len(data)], device=device), group)
    told = [int(size) for size in sizes]
    for k, size in enumerate(told):
        if not 0 <= size <= MAX_BYTES:
            raise ModelError(f"process {k} tells {size} bytes, and at most {MAX_BYTES} are taken")
    room = max(*told, 1)
    all_of = [torch.empty(room, dtype=torch.uint8, device=device) for _ in told]
    mine = torch.zeros(room, dtype=torch.uint8)
    if data:
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    dist.all_gather(all_of, mine.to(device), group)
    return [_tensor_to_bytes(one[:size]) for one, size in zip(all_of, told, strict=True)]


def broadcast(value: object, source: int, group: Any = None, record_types: RecordTypes = ()) -> Any:
    """What the process of rank `source` in the group tells all others; all of them call this."""
    device, own = select_exchange_device(group), b""
    if dist.get_rank(group) == source:
        own = encode_value(value, record_types)
    size = torch.tensor([len(own)], device=device)
    dist.broadcast(size, group=group, group_src=source)
    if not 0 <= int(size) <= MAX_BYTES:
        raise ModelError(
            f"process {source} tells {int(size)} bytes, and at most {MAX_BYTES} are taken"
        )
    data = torch.zeros(max(int(size), 1), dtype=torch.uint8)
    if own:
        data[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    data = data.to(device)
    dist.broadcast(data, group=group, group_src=source)
    return decode_value(_tensor_to_bytes(data[: int(size)]), f"process {source}", record_types)


def select_exchange_device(group: Any = None) -> torch.device:
    """Where processes of a group tell each other: on the host, if they have a backend there."""
    some: Any = group or dist.group.WORLD
    kinds = {device.type for device in some._device_types}
    if "cpu" in kinds or not kinds:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _tensor_to_bytes(data: Tensor) -> bytes:
    return data.cpu().numpy().tobytes()


def find_difference(facts_per_process: Sequence[Mapping[str, str]]) -> str:
    """Of the facts that processes tell, by name, the first in which two differ that have it, as a
    sentence; "" where there is none."""
    # In sorted order, so that all processes say the same of several differences.
    for fact in sorted({fact for own in facts_per_process for fact in own}):
        values = {k: own[fact] for k, own in enumerate(facts_per_process) if fact in own}
        first = next(iter(values))
        for other, value in values.items():
            if value != values[first]:
                return (
                    f"processes {first} and {other} do not agree on {fact}: {values[first]} and "
                    f"{value}"
                )
    return ""


# ---------------------------------------------------------------- values and bytes


def encode_value(value: object, record_types: RecordTypes = ()) -> bytes:
    """A value as bytes; TypeError for one that is not plain."""
    return json.dumps(_add_tags(value, record_types)).encode()


def decode_value(data: bytes, sender: str, record_types: RecordTypes = ()) -> Any:
    """The value that bytes say.  Raises ModelError for what `encode_value` does not write."""
    try:
        return _remove_tags(json.loads(data), {kind.__name__: kind for kind in record_types})
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        raise ModelError(f"{sender} tells what is no plain value: {data[:40]!r}") from None


def _add_tags(value: object, record_types: RecordTypes) -> Any:
    if type(value) in record_types:
        return {
            "record": [
                type(value).__name__,
                *(_add_tags(part, record_types) for part in _list_record_fields(value)),
            ]
        }
    if isinstance(value, Enum):
        raise TypeError(f"{value!r} is of no kind that is told")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, tuple):
        return {"tuple": [_add_tags(part, record_types) for part in value]}
    if isinstance(value, Mapping):
        return {
            "dict": [
                [_add_tags(k, record_types), _add_tags(v, record_types)] for k, v in value.items()
            ]
        }
    if isinstance(value, list):
        return [_add_tags(part, record_types) for part in value]
    raise TypeError(f"{describe(value)} is no plain value")


def _list_record_fields(value: Any) -> list[object]:
    """What a record is made of: that of a number with a name is the number."""
    if isinstance(value, Enum):
        return [value.value]
    return [getattr(value, f.name) for f in fields(value)] if is_dataclass(value) else [*value]


def _remove_tags(tagged: Any, record_types: Mapping[str, type]) -> Any:
    if isinstance(tagged, list):
        return [_remove_tags(part, record_types) for part in tagged]
    if not isinstance(tagged, dict):
        return tagged
    ((tag, inside),) = tagged.items()
    match tag:
        case "tuple":
            return tuple(_remove_tags(part, record_types) for part in inside)
        case "dict":
            return {
                _remove_tags(key, record_types): _remove_tags(part, record_types)
                for key, part in inside
            }
        case "dtype":
            found = getattr(torch, inside)
            if not isinstance(found, torch.dtype):
                raise TypeError
            return found
        case "record":
            name, *parts = inside
            return record_types[name](*(_remove_tags(part, record_types) for part in parts))
    raise LookupError
