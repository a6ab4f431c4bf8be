"""Gather and broadcast plain values between processes, as JSON.

torch's `all_gather_object` unpickles the data of peers, and a pickle can run code. JSON cannot.
Tags encode the types that JSON lacks: tuples, dicts with keys other than strings, dtypes of torch,
and the record types that the receiver allows.
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

# A process may send at most this number of bytes. So it cannot exhaust the memory of a peer.
MAX_BYTES: Final = 2**28
_MAX_FACT_LENGTH: Final = 120  # the largest number of characters of a fact in an error message
RecordTypes = Sequence[type]  # NamedTuples, dataclasses and Enums


def gather(value: object, group: Any = None, record_types: RecordTypes = ()) -> list[Any]:
    """Return the values of all processes of a group, in the order of their ranks in the group.

    All processes of the group must call this.

    Args:
        value: The value of this process. The value consists of None, numbers, strings, lists,
            tuples, dicts, dtypes of torch, and instances of `record_types`.
        group: The process group. By default all processes.
        record_types: NamedTuples, dataclasses and Enums that values may contain.

    Raises:
        ModelError: A peer sent more than `MAX_BYTES`, or data that cannot be decoded.
        TypeError: `value` contains an object that cannot be encoded.
    """
    encoded = gather_bytes(encode_value(value, record_types), group)
    return [decode_value(data, f"process {k}", record_types) for k, data in enumerate(encoded)]


def gather_bytes(data: bytes, group: Any = None) -> list[bytes]:
    """Return the bytes of all processes of a group, in the order of their ranks in the group.

    All processes of the group must call this.

    Args:
        data: The bytes of this process. Sizes may differ between processes.
        group: The process group. By default all processes.

    Raises:
        ModelError: A process sends more than `MAX_BYTES`.
    """
    device = select_exchange_device(group)
    processes = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(processes)]
    dist.all_gather(sizes, torch.tensor([len(data)], device=device), group)
    byte_counts = [int(size) for size in sizes]
    for k, size in enumerate(byte_counts):
        if not 0 <= size <= MAX_BYTES:
            raise ModelError(f"process {k} sends {size} bytes, but the limit is {MAX_BYTES}")
    max_count = max(*byte_counts, 1)
    tensors = [torch.empty(max_count, dtype=torch.uint8, device=device) for _ in byte_counts]
    padded = torch.zeros(max_count, dtype=torch.uint8)
    if data:
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    dist.all_gather(tensors, padded.to(device), group)
    return [
        _tensor_to_bytes(tensor[:size]) for tensor, size in zip(tensors, byte_counts, strict=True)
    ]


def broadcast(value: object, source: int, group: Any = None, record_types: RecordTypes = ()) -> Any:
    """Return the value of one process on all processes of a group.

    All processes of the group must call this.

    Args:
        value: The value to send, see `gather`. Only the source uses this argument.
        source: The rank of the sender in the group.
        group: The process group. By default all processes.
        record_types: NamedTuples, dataclasses and Enums that the value may contain.

    Raises:
        ModelError: The source sent more than `MAX_BYTES`, or data that cannot be decoded.
        TypeError: On the source, `value` contains an object that cannot be encoded.
    """
    device, encoded = select_exchange_device(group), b""
    if dist.get_rank(group) == source:
        encoded = encode_value(value, record_types)
    size = torch.tensor([len(encoded)], device=device)
    dist.broadcast(size, group=group, group_src=source)
    if not 0 <= int(size) <= MAX_BYTES:
        raise ModelError(f"process {source} sends {int(size)} bytes, but the limit is {MAX_BYTES}")
    data = torch.zeros(max(int(size), 1), dtype=torch.uint8)
    if encoded:
        data[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    data = data.to(device)
    dist.broadcast(data, group=group, group_src=source)
    return decode_value(_tensor_to_bytes(data[: int(size)]), f"process {source}", record_types)


def require_process_group() -> None:
    """Check that torch.distributed has the group of all processes.

    Raises:
        ModelError: `init_process_group` was not called, or the group was destroyed.
    """
    if not dist.is_initialized():
        raise ModelError(
            "torch.distributed has no process group: it was not created, or was already destroyed",
            hint="call torch.distributed.destroy_process_group() at the end of the script",
        )


def select_exchange_device(group: Any = None) -> torch.device:
    """Return the device for exchanges in a group: the CPU if the group has a backend for it.

    Args:
        group: The process group. By default all processes.

    Returns:
        The CPU, or the current GPU if the group has only a GPU backend.
    """
    require_process_group()
    process_group: Any = group or dist.group.WORLD
    kinds = {device.type for device in process_group._device_types}
    if "cpu" in kinds or not kinds:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _tensor_to_bytes(data: Tensor) -> bytes:
    return data.cpu().numpy().tobytes()


def find_difference(facts_per_process: Sequence[Mapping[str, str]]) -> str:
    """Return a sentence about the first fact in which two processes differ, or "".

    Two processes differ in a fact if both have the fact and its values are not equal.

    Args:
        facts_per_process: The facts of each process: values by name.
    """
    # Names are sorted, so that all processes report the same difference.
    for fact in sorted({fact for facts in facts_per_process for fact in facts}):
        values = {k: facts[fact] for k, facts in enumerate(facts_per_process) if fact in facts}
        first_process = next(iter(values))
        for process, value in values.items():
            if value != values[first_process]:
                first_text, other_text = _cut_around_difference(values[first_process], value)
                return (
                    f"processes {first_process} and {process} do not agree on {fact}: "
                    f"{first_text} and {other_text}"
                )
    return ""


def _cut_around_difference(first: str, other: str) -> tuple[str, str]:
    """Cut two long texts to the characters around the first character that differs."""
    if max(len(first), len(other)) <= _MAX_FACT_LENGTH:
        return first, other
    pairs = enumerate(zip(first, other, strict=False))
    common_length = next((k for k, (a, b) in pairs if a != b), min(len(first), len(other)))
    begin = max(common_length - _MAX_FACT_LENGTH // 2, 0)
    end = begin + _MAX_FACT_LENGTH
    first, other = (
        f"{'... ' * (begin > 0)}{text[begin:end]}{' ...' * (end < len(text))}"
        for text in (first, other)
    )
    return first, other


# ---------------------------------------------------------------- values and bytes


def encode_value(value: object, record_types: RecordTypes = ()) -> bytes:
    """Return a value as JSON bytes.

    Args:
        value: The value, see `gather`.
        record_types: Record types that the value may contain.

    Raises:
        TypeError: The value has a type that cannot be encoded.
    """
    return json.dumps(_add_tags(value, record_types)).encode()


def decode_value(data: bytes, sender: str, record_types: RecordTypes = ()) -> Any:
    """Return the value that `encode_value` encoded.

    Args:
        data: The bytes.
        sender: The name of the sender, for the error message.
        record_types: Record types that the value may contain.

    Raises:
        ModelError: `encode_value` cannot have written these bytes.
    """
    try:
        return _remove_tags(json.loads(data), {kind.__name__: kind for kind in record_types})
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        raise ModelError(f"{sender} sent data that schedir cannot decode: {data[:40]!r}") from None


def _add_tags(value: object, record_types: RecordTypes) -> Any:
    if type(value) in record_types:
        return {
            "record": [
                type(value).__name__,
                *(_add_tags(part, record_types) for part in _list_record_fields(value)),
            ]
        }
    if isinstance(value, Enum):
        raise TypeError(f"{value!r} is an Enum that is not in record_types")
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
    raise TypeError(f"{describe(value)} cannot be encoded as JSON")


def _list_record_fields(value: Any) -> list[object]:
    """Return the arguments that construct a record: the fields, or the value of an Enum."""
    if isinstance(value, Enum):
        return [value.value]
    return [getattr(value, f.name) for f in fields(value)] if is_dataclass(value) else [*value]


def _remove_tags(tagged: Any, record_types: Mapping[str, type]) -> Any:
    if isinstance(tagged, list):
        return [_remove_tags(part, record_types) for part in tagged]
    if not isinstance(tagged, dict):
        return tagged
    ((tag, content),) = tagged.items()
    match tag:
        case "tuple":
            return tuple(_remove_tags(part, record_types) for part in content)
        case "dict":
            return {
                _remove_tags(key, record_types): _remove_tags(part, record_types)
                for key, part in content
            }
        case "dtype":
            dtype = getattr(torch, content)
            if not isinstance(dtype, torch.dtype):
                raise TypeError
            return dtype
        case "record":
            name, *parts = content
            return record_types[name](*(_remove_tags(part, record_types) for part in parts))
    raise LookupError
