"""Tests of the number of streams of a rank over NCCL, and of programs with too many."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from schedir import compile
from schedir.errors import ModelError
from schedir.io.terminal_output import format_error
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.runtime import nccl_transport
from schedir.schedules import dualpipe, interleaved, looped_bfs, one_f_one_b
from schedir.transports.gpu_selection import QUEUES_VARIABLE
from schedir.transports.nccl import count_streams, require_enough_queues
from schedir.transports.process_transport import LaneWork
from tests.cpu.virtual_gpu import Stream, install_virtual_gpu

GOLDEN = Path(__file__).parents[1] / "golden"


def _compile_program(schedule: Any, shape: PipelineShape, tp: int = 2) -> Program:
    return compile(
        schedule, shape, tp=tp, dp=2, progress_model="per_edge", tied_weights=True,
        clip_grad_norm=True, overlap=True
    )  # fmt: skip


def test_stream_counts_of_usual_programs() -> None:
    mirror = PipelineShape(8, 16, placement="mirror")
    for program, most in (
        (_compile_program(one_f_one_b, PipelineShape(8, 16)), 18),
        (_compile_program(interleaved, PipelineShape(8, 16, 2)), 19),
        (_compile_program(dualpipe, mirror), 29),
        (_compile_program(dualpipe, mirror, tp=1), 25),
    ):
        counts = [count_streams(program, rank, "per_edge") for rank in range(8)]
        assert max(sum(count.values()) for count in counts) == most
        require_enough_queues(program, "per_edge", {QUEUES_VARIABLE: "32"})
        grouped_counts = [count_streams(program, rank, "per_device") for rank in range(8)]
        assert all(count["messages"] == 2 and count["records"] == 1 for count in grouped_counts)


def test_stream_counts_of_middle_rank() -> None:
    """The expected numbers are counted by hand.

    There are a compute stream, two for layers, two for gathers, dp and the norm, and four edges,
    two of which are received.
    """
    assert count_streams(_compile_program(one_f_one_b, PipelineShape(8, 16)), 3, "per_edge") == {
        "computation": 1, "layers": 2, "gathers": 2, "reductions": 3, "messages": 8, "records": 2,
    }  # fmt: skip


def test_more_streams_than_queues_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes before any group is created, and lists the use of the streams."""
    placement = (*range(8), 0, 2, 4, 6, 1, 3, 5, 7, 0, 3, 6, 1, 4, 7, 2, 5, 0, 5, 2, 7, 4, 1, 6, 3)
    large = _compile_program(looped_bfs, PipelineShape(8, 8, 4, placement=placement))
    small = _compile_program(one_f_one_b, PipelineShape(4, 8))
    errors = []
    for program, queues in ((large, "32"), (large, "64"), (small, "16"), (small, None)):
        monkeypatch.delenv(QUEUES_VARIABLE, raising=False)
        if queues is not None:
            monkeypatch.setenv(QUEUES_VARIABLE, queues)
        with pytest.raises(ModelError) as error:
            nccl_transport(program, torch.device("cuda", 0))
        errors.append(format_error(error.value))
    assert "\n".join(errors) + "\n" == (GOLDEN / "queues.txt").read_text()
    require_enough_queues(large, "per_device", {QUEUES_VARIABLE: "32"})


def test_lane_work_keeps_tensor_until_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute may free the memory earlier, and the allocator would reuse it."""
    lane: Any = Stream(install_virtual_gpu(monkeypatch))
    tensor = torch.zeros(4)
    reference = weakref.ref(tensor)
    work = LaneWork(lane, (tensor,))
    del tensor
    gc.collect()
    assert reference() is not None
    work.wait()
    gc.collect()
    assert reference() is None
