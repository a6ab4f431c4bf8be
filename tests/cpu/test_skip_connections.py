"""Tests of skip connections: processes, sizes, the example, and refusals."""

from __future__ import annotations

import runpy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from schedir import schedules
from schedir.analysis.progress_models import ProgressModel
from schedir.compiler.compile import compile
from schedir.errors import ExecutionError, ModelError
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.pipeline.skip_connections import Skips
from schedir.runtime.autograd.split_backward import linear
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.boundaries.size_measurement import measure_sizes
from schedir.runtime.executor import Executor
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.sequential_reference import run_sequential
from schedir.schedules.schedule_algebra import Schedule
from schedir.transports.gloo import GlooTransport
from schedir.transports.p2p_groups import EdgeGroups
from schedir.transports.shared_memory import SharedMemoryTransport
from tests.cpu.gloo_processes import run
from tests.cpu.tiny_stages import have_same_bits

torch.set_num_threads(1)

ROOT = Path(__file__).parents[2]

WIDTH, NARROW = 8, 4
SCHEDULES: dict[str, tuple[Schedule, PipelineShape, Skips]] = {
    "1f1b": (schedules.one_f_one_b, PipelineShape(4, 5), ((0, 2), (1, 3))),
    "interleaved": (schedules.interleaved, PipelineShape(2, 4, 3), ((0, 5), (1, 4))),
    "zb_v": (schedules.zb_v, PipelineShape(3, 6, 2, "vee"), ((0, 5), (1, 3), (2, 4))),
}


class Layer(nn.Module):
    """A stage of a U-Net that may receive or return a skip of one or two tensors."""

    def __init__(self, num_returned: int, num_accepted: int) -> None:
        super().__init__()
        self.num_returned, self.num_accepted = num_returned, num_accepted
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.narrow = nn.Parameter(torch.randn(NARROW, WIDTH)) if num_returned else None
        self.wide = nn.Parameter(torch.randn(WIDTH, NARROW)) if num_accepted else None

    def forward(self, x: Tensor, *skip: Any) -> Any:
        assert len(skip) == (self.num_accepted > 0)
        if self.wide is not None:
            skip_value = skip[0]
            if self.num_accepted > 1:
                skip_value, shift = skip_value
                x = x.roll(int(shift[0]), -1)
            x = x + linear(skip_value, self.wide)
        y = F.dropout(torch.tanh(linear(self.norm(x), self.weight)), 0.2, self.training)
        if self.narrow is None:
            return y
        out = torch.relu(linear(y, self.narrow))
        return y, (out if self.num_returned == 1 else (out, torch.tensor([3])))


def make_stages(stages: int, skips: Skips, seed: int = 0) -> list[nn.Module]:
    """Return stages in which every second skip has two tensors, one of them of integers."""
    torch.manual_seed(seed)
    num_returned = {s: 1 + k % 2 for k, (s, _) in enumerate(skips)}
    num_accepted = {t: num_returned[s] for s, t in skips}
    return [Layer(num_returned.get(s, 0), num_accepted.get(s, 0)) for s in range(stages)]


def make_boundaries(stages: int, skips: Skips) -> Any:
    skip_boundaries = Boundary((2, NARROW)), (Boundary((2, NARROW)), Boundary((1,), torch.int64))
    boundaries: dict[Any, Any] = {s: Boundary((2, WIDTH)) for s in range(stages - 1)}
    return boundaries | {skip: skip_boundaries[k % 2] for k, skip in enumerate(skips)}


def make_batch(m: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(5)
    return torch.randn(m, 2, WIDTH), torch.randn(m, 2, WIDTH)


TRANSPORTS: dict[str, Any] = {
    "gloo": GlooTransport, "shared_memory": SharedMemoryTransport, "edge": EdgeGroups,
}  # fmt: skip


def run_process(rank: int, transport: str, name: str, model_of: ProgressModel) -> list[Any]:
    schedule, shape, skips = SCHEDULES[name]
    slots: Any = None if transport == "shared_memory" else "minimal"
    program = compile(
        schedule, shape, progress_model=model_of, skips=skips, buffer_sharing=slots,
        blocking_hosts=True,
    )  # fmt: skip
    stages = make_stages(shape.stages, skips)
    x, y = make_batch(shape.microbatches)
    own_stages = {s: stages[s] for s in shape.stages_on_rank[rank]}
    executor = Executor(
        program, rank, own_stages, TRANSPORTS[transport](program), loss=F.mse_loss,
        boundary=make_boundaries(shape.stages, skips),
    )  # fmt: skip
    for _ in range(2):
        total = executor.step(x, y)
    grads = {s: [p.grad for p in stage.parameters()] for s, stage in own_stages.items()}
    return [total if total is None else float(total), grads]


@pytest.mark.parametrize(
    ("transport", "name", "model_of"),
    [
        ("gloo", "zb_v", "per_device"),
        ("shared_memory", "1f1b", "per_edge"),
        ("edge", "interleaved", "per_edge"),
    ],
)
def test_skip_connections_on_processes_have_reference_bits(
    transport: str, name: str, model_of: ProgressModel
) -> None:
    schedule, shape, skips = SCHEDULES[name]
    results = run(run_process, shape.ranks, transport, name, model_of)
    reference_stages = make_stages(shape.stages, skips)
    x, y = make_batch(shape.microbatches)
    program = compile(schedule, shape, skips=skips)
    expected_loss = run_sequential(reference_stages, x, y, loss=F.mse_loss, program=program, step=1)
    assert float(expected_loss) in [total for total, _ in results]
    for _, grads_by_stage in results:
        for s, grads in grads_by_stage.items():
            assert have_same_bits(grads, [p.grad for p in reference_stages[s].parameters()])


def test_measured_sizes_include_skips() -> None:
    skips = ((0, 2), (1, 3))
    x, y = make_batch(1)
    sizes = measure_sizes(
        make_stages(4, skips), x[0], y[0], loss=F.mse_loss, boundary=make_boundaries(4, skips)
    )
    assert sizes.skip == (2 * NARROW * 4, 512, 0, 0)  # the second tensor begins at byte 256
    assert sizes.activation == 2 * WIDTH * 4


def test_unused_skip_has_zero_gradient() -> None:
    def return_skip(y: Tensor) -> Any:
        return y, 7 * y

    (world, x) = make_executor(return_skip, loss=lambda y, _: y.sum())
    world.step(x, x)
    weight = world.executors[0].stages[0].module.get_parameter("weight")
    assert weight.grad is not None and weight.grad.tolist() == [2.0] * WIDTH


def test_example_prints_documented_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    example = runpy.run_path(str(ROOT / "examples" / "skip.py"))
    with warnings.catch_warnings(record=True):  # convolutions are not split
        warnings.simplefilter("always")
        example["main"](str(tmp_path / "skip.svg"))
    page = (ROOT / "docs" / "how-to" / "train-your-own-model.md").read_text()
    assert f"$ python examples/skip.py\n{capsys.readouterr().out}" in page
    assert (tmp_path / "skip.svg").read_text().startswith("<?xml")


class GivenOutput(nn.Module):
    """A stage that returns a given result."""

    def __init__(self, make_output: Any = None) -> None:
        super().__init__()
        self.weight, self.make_output = nn.Parameter(torch.ones(WIDTH)), make_output

    def forward(self, x: Tensor, *skip: Tensor) -> Any:
        y = self.weight * x
        return y if self.make_output is None else self.make_output(y)


def make_executor(make_output: Any, **options: Any) -> tuple[InProcessExecutor, Tensor]:
    """Return three stages with a skip over the second, and their input."""
    stages = [GivenOutput(make_output), GivenOutput(), GivenOutput()]
    program = compile(schedules.gpipe, PipelineShape(3, 2), skips=((0, 2),))
    x = torch.ones(2, WIDTH)
    options = {"loss": F.mse_loss, "boundary": (WIDTH,), **options}
    return InProcessExecutor(program, stages, **options), x


WRONG_OUTPUTS: list[tuple[Any, dict[str, Any], str, str]] = [
    (None, {}, "a tuple of at least two entries, not [8] of torch.float32", "return y, skip"),
    (lambda y: [y], {}, "a tuple of at least two entries, not list", "return y, skip"),
    (lambda y: (y, 3), {}, "returns int", "a tensor, or a tuple of tensors"),
    (lambda y: (y, y[:3]), {}, "as tensor 1, but the boundary is [8]", ""),
    (lambda y: (y, (y, y)), {}, "returns 3 values", ""),
    (lambda y: (y, y.detach()), {},
     "tensor 1 that stage 0 returns has requires_grad=False", "grad=False"),
    (lambda y: (y, y), {"boundary": {0: (8,), 1: (8,)}},
     "and the skip connections [(0, 2)]", "(0, 2): "),
    (lambda y: (y, y.long()),
     {"boundary": {0: (8,), 1: (8,), (0, 2): Boundary((8,), torch.int64)}},
     "the boundary from stage 0 to 2 has no gradient", "depends on trained weights"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("make_output", "options", "fact", "hint"), WRONG_OUTPUTS, ids=[w[2] for w in WRONG_OUTPUTS]
)
def test_wrong_skip_output_is_refused(
    make_output: Any, options: dict[str, Any], fact: str, hint: str
) -> None:
    with pytest.raises((ExecutionError, ModelError)) as caught:
        world, x = make_executor(make_output, **options)
        world.step(x, x)
    assert fact in caught.value.fact, caught.value.fact
    assert hint in caught.value.hint
