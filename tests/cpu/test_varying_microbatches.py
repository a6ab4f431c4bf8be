"""Tests of microbatches of different shapes: bytes of buffers, processes, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schedir.compiler.compile import compile
from schedir.errors import SchedirError
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.passes.pass_types import BufferSharing
from schedir.runtime.autograd.splittable_layers import make_backward_splittable
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.boundaries.microbatch_boundaries import PerMicrobatchBoundary
from schedir.runtime.boundaries.size_measurement import measure_sizes
from schedir.runtime.executor import Executor
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.sequential_reference import run_sequential
from schedir.runtime.services.message_buffers import MessageBuffers
from schedir.schedules import gpipe, one_f_one_b
from schedir.transports.gloo import GlooTransport
from schedir.transports.shared_memory import SharedMemoryTransport
from tests.cpu.gloo_processes import run
from tests.cpu.multi_tensor_stages import copy_gradients, have_same_bits, squared_error
from tests.cpu.train_command import run_launched

torch.set_num_threads(1)
WIDTH = 4


class PackedSequences(nn.Module):
    """Passes numbers, and the ends of the packed sequences."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.linear(x)) + x.cumsum(0)[ends].sum(0), ends


class LastStage(PackedSequences):
    """Returns only the numbers."""

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, ends)[0]


def make_stages(stages: int) -> list[nn.Module]:
    return [
        make_backward_splittable(stage)
        for stage in (*map(PackedSequences, range(stages - 1)), LastStage(stages))
    ]


def make_batch(lengths: list[tuple[int, int]]) -> tuple[Any, Any, PerMicrobatchBoundary]:
    """Return microbatches with these numbers of tokens and sequences."""
    torch.manual_seed(1)
    x = [(torch.randn(n, WIDTH), torch.randint(n, (k,))) for n, k in lengths]
    y = [torch.randn(n, WIDTH) for n, _ in lengths]
    boundaries = [(Boundary((n, WIDTH)), Boundary((k,), torch.int64)) for n, k in lengths]
    return x, y, PerMicrobatchBoundary(boundaries)


LENGTHS = [(3, 1), (5, 2), (1, 1), (4, 3)]


def test_slot_size_is_that_of_its_largest_microbatch() -> None:
    x, y, boundary = make_batch([(300, 1), (500, 2), (100, 1), (400, 3)])
    lengths = [300, 500, 100, 400]
    choices: list[tuple[BufferSharing | None, list[int]]] = [
        ("minimal", [max(lengths)]),
        (None, lengths),
    ]
    for slots, expected in choices:
        program = compile(gpipe, PipelineShape(2, 4), buffer_sharing=slots)
        ranks = InProcessExecutor(program, make_stages(2), loss=squared_error, boundary=boundary)
        ranks.step(x, y)
        received = ranks.executors[1].state.service(MessageBuffers).received.values()
        sizes = [buffer.nbytes for buffer in received]
        # The ends of sequences follow the numbers, and both start at multiples of 256 bytes.
        assert sizes == [-(-n * WIDTH * 4 // 256) * 256 + 256 for n in expected]


CASES: list[tuple[Any, PipelineShape, dict[str, Any]]] = [
    (GlooTransport, PipelineShape(2, 4), {}),
    (GlooTransport, PipelineShape(2, 4), {"buffer_sharing": "minimal"}),
    (GlooTransport, PipelineShape(1, 4), {"tp": 2}),
    (SharedMemoryTransport, PipelineShape(2, 4), {}),
]


def run_cases(process: int) -> list[Any]:
    """Return for each case the gradients of this process's stages."""
    x, y, boundary = make_batch(LENGTHS)
    gradients_by_case = []
    for make, shape, options in CASES:
        program = compile(one_f_one_b, shape, progress_model=make.progress_model, **options)
        transport, stages = make(program), make_stages(shape.stages)
        executor = Executor(
            program, transport.rank, stages, transport, loss=squared_error, boundary=boundary
        )
        for _ in range(2):
            executor.step(x, y)
        own_stages = [stages[s] for s in shape.stages_on_rank[transport.rank]]
        gradients_by_case.append(copy_gradients(own_stages))
    return gradients_by_case


def test_processes_have_reference_bits() -> None:
    """The transports are Gloo, with and without shared slots, and shared memory."""
    results = run(run_cases, 2)
    x, y, _ = make_batch(LENGTHS)
    for case, (_, shape, _) in enumerate(CASES):
        reference_stages = make_stages(shape.stages)
        run_sequential(reference_stages, x, y, loss=squared_error)
        for rank in range(2):
            own_stages = shape.stages_on_rank[rank if shape.ranks > 1 else 0]
            assert have_same_bits(
                results[rank][case], copy_gradients([reference_stages[s] for s in own_stages])
            )


def test_seq1f1b_runs_on_real_processes(tmp_path: Path) -> None:
    """The example itself compares gradients with loops over chunks and over sequences."""
    example = Path(__file__).parents[2] / "examples/seq1f1b_run.py"
    code, _, err = run_launched([str(example)], tmp_path / "run")
    assert code == 0, err


# ---------------------------------------------------------------- refusals

GOLDEN = Path(__file__).parents[1] / "golden" / "per_microbatch.txt"
SHAPES = [(3, WIDTH), (2, WIDTH)]


def run_step(boundary: Any, lengths: tuple[int, ...] = (3, 2)) -> object:
    stages = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    ranks = InProcessExecutor(
        compile(gpipe, PipelineShape(2, 2)), stages, loss=squared_error, boundary=boundary
    )
    return ranks.step([torch.ones(n, WIDTH) for n in lengths], [torch.ones(WIDTH)] * 2)


MISTAKES: dict[str, Callable[[], object]] = {
    "another number": lambda: run_step(PerMicrobatchBoundary(SHAPES[:1])),
    "a generator": lambda: run_step(PerMicrobatchBoundary(shape for shape in SHAPES)),  # type: ignore[arg-type]
    "another shape": lambda: run_step(PerMicrobatchBoundary(SHAPES), (3, 3)),
    "an edge of one": lambda: run_step(PerMicrobatchBoundary([{0: SHAPES[0]}, {1: SHAPES[1]}])),
    "sizes of several": lambda: measure_sizes(
        [nn.Identity(), nn.Identity()], torch.ones(WIDTH), torch.ones(WIDTH), loss=squared_error,
        boundary=PerMicrobatchBoundary(SHAPES),  # type: ignore[arg-type]
    ),
}  # fmt: skip


def describe_error(mistake: Callable[[], object]) -> str:
    with pytest.raises(SchedirError) as error:
        mistake()
    return f"{type(error.value).__name__}: {error.value}"


def test_mistakes_are_refused_with_golden_errors() -> None:
    errors = "".join(f"{name}\n  {describe_error(mistake)}\n" for name, mistake in MISTAKES.items())
    assert errors == GOLDEN.read_text()
