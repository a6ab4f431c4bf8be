"""The options of `compile` that are attributes of programs or options of passes, with their types.

A test compares the names with `ATTRIBUTE_FIELDS` and `PASS_OPTIONS`, which define the options.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any, TypedDict, TypeVar

from schedir.passes.selection import Selection
from schedir.passes.splitting.stage_segmentation import SegmentSpec

_Function = TypeVar("_Function", bound=Callable[..., Any])


class CompileOptions(TypedDict, total=False):
    """The keywords of `compile` beyond its explicit ones.  None means that an option is not given.

    `schedir options` describes them.
    """

    checkpoint_snapshots: bool | None
    chunks_per_microbatch: int | None
    ep: int | None
    fill_collective_waits: str | None
    frozen_stages: int | None
    host_memory_limit: float | str | None
    microbatch_chunks: int | None
    norm_check: str | None
    offload: Selection | None
    offload_to_disk: Selection | None
    optimizer_device_buffers: int | None
    optimizer_host_buffers: int | None
    optimizer_placement: str | None
    recompute: Selection | None
    recompute_at: str | None
    reduce_scatter_at: str | None
    segment_boundaries: str | None
    sequence_parallel: bool | None
    stage_segments: SegmentSpec | None
    unshard_prefetch: int | None
    unsharded_stages: int | None
    zero: int | None


def list_options_in_signature(function: _Function) -> _Function:
    """Replace `**extra_options` in the signature that `help` and notebooks show by the options.

    Args:
        function: A function whose last parameter is `**extra_options: Unpack[CompileOptions]`.
    """
    own = signature(function)
    options = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in CompileOptions.__annotations__.items()
    ]
    parameters = [*[*own.parameters.values()][:-1], *options]
    vars(function)["__signature__"] = own.replace(parameters=parameters)
    return function
