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

MOST: Final = 2**28  # bytes that a process may tell
Kinds = Sequence[type]  # NamedTuples, dataclasses and Enums


def gather(value: object, group: Any = None, kinds: Kinds = ()) -> list[Any]:
    """What each process of a group tells, by rank; all of them call this.

    A value is made of None, numbers, text, lists, tuples, dicts, types of torch, and records of
    these `kinds`.  Raises ModelError for a value that a peer sends and that is none.
    """
    told = gather_bytes(encoded(value, kinds), group)
    return [decoded(data, f"process {k}", kinds) for k, data in enumerate(told)]


def gather_bytes(own: bytes, group: Any = None) -> list[bytes]:
    """The bytes of each process of a group, by rank; all of them call this.

    Raises ModelError where one tells too much.
    """
    device, processes = device_of(group), dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(processes)]
    dist.all_gather(sizes, torch.tensor([len(own)], device=device), group)
    told = [int(size) for size in sizes]
    for k, size in enumerate(told):
        if not 0 <= size <= MOST:
            raise ModelError(f"process {k} tells {size} bytes, and at most {MOST} are taken")
    room = max(*told, 1)
    all_of = [torch.empty(room, dtype=torch.uint8, device=device) for _ in told]
    mine = torch.zeros(room, dtype=torch.uint8)
    if own:
        mine[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    dist.all_gather(all_of, mine.to(device), group)
    return [_bytes(one[:size]) for one, size in zip(all_of, told, strict=True)]


def broadcast(value: object, source: int, group: Any = None, kinds: Kinds = ()) -> Any:
    """What the process of rank `source` in the group tells all others; all of them call this."""
    device, own = device_of(group), b""
    if dist.get_rank(group) == source:
        own = encoded(value, kinds)
    size = torch.tensor([len(own)], device=device)
    dist.broadcast(size, group=group, group_src=source)
    if not 0 <= int(size) <= MOST:
        raise ModelError(f"process {source} tells {int(size)} bytes, and at most {MOST} are taken")
    data = torch.zeros(max(int(size), 1), dtype=torch.uint8)
    if own:
        data[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    data = data.to(device)
    dist.broadcast(data, group=group, group_src=source)
    return decoded(_bytes(data[: int(size)]), f"process {source}", kinds)


def device_of(group: Any = None) -> torch.device:
    """Where processes of a group tell each other: on the host, if they have a backend there."""
    some: Any = group or dist.group.WORLD
    kinds = {device.type for device in some._device_types}
    if "cpu" in kinds or not kinds:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _bytes(data: Tensor) -> bytes:
    return data.cpu().numpy().tobytes()


def difference(everyone: Sequence[Mapping[str, str]]) -> str:
    """Of the facts that processes tell, by name, the first in which two differ that have it, as a
    sentence; "" where there is none."""
    # In sorted order, so that all processes say the same of several differences.
    for fact in sorted({fact for own in everyone for fact in own}):
        values = {k: own[fact] for k, own in enumerate(everyone) if fact in own}
        first = next(iter(values))
        for other, value in values.items():
            if value != values[first]:
                return (
                    f"processes {first} and {other} do not agree on {fact}: {values[first]} and "
                    f"{value}"
                )
    return ""


# ---------------------------------------------------------------- values and bytes


def encoded(value: object, kinds: Kinds = ()) -> bytes:
    """A value as bytes; TypeError for one that is not plain."""
    return json.dumps(_tagged(value, kinds)).encode()


def decoded(data: bytes, who: str, kinds: Kinds = ()) -> Any:
    """The value that bytes say.  Raises ModelError for what `encoded` does not write."""
    try:
        return _value(json.loads(data), {kind.__name__: kind for kind in kinds})
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        raise ModelError(f"{who} tells what is no plain value: {data[:40]!r}") from None


def _tagged(value: object, kinds: Kinds) -> Any:
    if type(value) in kinds:
        return {"record": [type(value).__name__, *(_tagged(part, kinds) for part in _parts(value))]}
    if isinstance(value, Enum):
        raise TypeError(f"{value!r} is of no kind that is told")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, tuple):
        return {"tuple": [_tagged(part, kinds) for part in value]}
    if isinstance(value, Mapping):
        return {"dict": [[_tagged(k, kinds), _tagged(v, kinds)] for k, v in value.items()]}
    if isinstance(value, list):
        return [_tagged(part, kinds) for part in value]
    raise TypeError(f"{describe(value)} is no plain value")


def _parts(value: Any) -> list[object]:
    """What a record is made of: that of a number with a name is the number."""
    if isinstance(value, Enum):
        return [value.value]
    return [getattr(value, f.name) for f in fields(value)] if is_dataclass(value) else [*value]


def _value(told: Any, kinds: Mapping[str, type]) -> Any:
    if isinstance(told, list):
        return [_value(part, kinds) for part in told]
    if not isinstance(told, dict):
        return told
    ((tag, inside),) = told.items()
    match tag:
        case "tuple":
            return tuple(_value(part, kinds) for part in inside)
        case "dict":
            return {_value(key, kinds): _value(part, kinds) for key, part in inside}
        case "dtype":
            found = getattr(torch, inside)
            if not isinstance(found, torch.dtype):
                raise TypeError
            return found
        case "record":
            name, *parts = inside
            return kinds[name](*(_value(part, kinds) for part in parts))
    raise LookupError
