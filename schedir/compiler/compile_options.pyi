# Generated from the options of programs and passes by `python -m schedir.compiler.compile`;
# do not edit.
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from schedir.passes.selection import Selection
from schedir.passes.splitting.stage_segmentation import SegmentSpec

_Function = TypeVar("_Function", bound=Callable[..., Any])
STUB_PATH: Path

def list_options_in_signature(function: _Function) -> _Function: ...
def make_stub(function: Callable[..., Any]) -> str: ...

class CompileOptions(TypedDict, total=False):
    """Keywords of `compile`, which `schedir options` describes.

    None means that an option is not given.
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
