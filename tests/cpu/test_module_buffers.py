"""Tests of module buffers and of the memory layout of values, in any schedule."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from schedir.compiler.compile import compile
from schedir.errors import ExecutionError
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.runtime import make_backward_splittable
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.executor import Executor
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.sequential_reference import run_sequential
from schedir.schedules import chimera, dualpipe, interleaved, one_f_one_b, zb_h1, zb_v
from schedir.schedules.schedule_algebra import B, F, RankSchedule
from schedir.transports.gloo import GlooTransport
from tests.cpu.gloo_processes import run
from tests.cpu.tiny_stages import copy_gradients, have_same_bits

WIDTH, ROWS = 8, 8
BOUNDARY = Boundary((ROWS, WIDTH))


class Normed(nn.Module):
    """A linear layer and a batch norm. One of them may be recomputed in the backward."""

    def __init__(self, k: int, again: str = "", replaces: bool = False) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.again, self.replaces = again, replaces
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(WIDTH))
        numbers = torch.Generator().manual_seed(k)
        for p in self.inner.parameters():
            p.data = torch.randn(p.shape, generator=numbers)
        make_backward_splittable(self)

    def forward(self, x: Tensor) -> Tensor:
        if self.replaces:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        x = self._run(self.inner, x)
        return torch.tanh(self._run(self.norm, x))

    def _run(self, part: nn.Module, x: Tensor) -> Tensor:
        kind = type(part).__name__
        if self.again and self.again in kind:
            y: Tensor = checkpoint(part, x, use_reentrant=False)
            return y
        return part(x)  # type: ignore[no-any-return]


def normed(stages: int, **options: Any) -> list[Any]:
    return [Normed(k, **options) for k in range(stages)]


def squares(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().sum()


def batch(m: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(m, *BOUNDARY.shape, generator=torch.Generator().manual_seed(9))
    return x, x + 1


def buffers(stages: Any) -> list[dict[str, Tensor]]:
    return [{name: b.clone() for name, b in stage.named_buffers()} for stage in stages]


def virtual(schedule: Any, shape: PipelineShape, stages: list[nn.Module]) -> InProcessExecutor:
    program = compile(schedule, shape, progress_model="per_edge")
    return InProcessExecutor(program, stages, loss=squares, boundary=BOUNDARY)


@pytest.mark.parametrize("again", ["", "Linear"])
@pytest.mark.parametrize(
    ("schedule", "shape"),
    [(one_f_one_b, PipelineShape(4, 6)), (zb_v, PipelineShape(2, 4, 2, "vee"))],
)
def test_running_statistics_equal_plain_loop(
    schedule: Any, shape: PipelineShape, again: str
) -> None:
    """In half of the cases, the linear layers are recomputed."""
    m = shape.microbatches
    stages_in_pipeline, reference_stages = (normed(shape.stages, replaces=True) for _ in range(2))
    for stage in stages_in_pipeline:
        stage.again = again
    ranks = virtual(schedule, shape, stages_in_pipeline)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for order in (None, 3):
            run_sequential(reference_stages, *batch(m), loss=squares)
            ranks.step(*batch(m), order_seed=order)
            assert have_same_bits(buffers(stages_in_pipeline), buffers(reference_stages))
    assert int(stages_in_pipeline[0].norm.num_batches_tracked) == 2 * m


class CachedNumbers(nn.Module):
    """Keeps constant numbers in a buffer. A recomputation creates or writes it again."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.inner = how, nn.Linear(WIDTH, WIDTH)
        self.cache: Tensor | None
        self.register_buffer("cache", None if how == "lazy" else self._numbers(), persistent=False)

    def _numbers(self) -> Tensor:
        return torch.arange(WIDTH + 0.0).index_fill(0, torch.tensor([0]), float("nan"))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.run, x, use_reentrant=False)
        return y

    def run(self, x: Tensor) -> Tensor:
        if self.cache is None or self.how == "replaced":
            self.cache = self._numbers()
        elif self.how == "written":
            self.cache.copy_(self._numbers())
        return self.inner(x) + self.cache.nan_to_num()  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["lazy", "replaced", "written"])
def test_rewriting_equal_values_to_buffer_is_accepted(how: str) -> None:
    shape = PipelineShape(2, 4, placement="mirror")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ranks = virtual(chimera, shape, [CachedNumbers(how) for _ in range(2)])
        for _ in range(2):
            ranks.step(*batch(4))


@pytest.mark.parametrize("schedule", [chimera, dualpipe])
@pytest.mark.parametrize("replaces", [False, True])
def test_changing_buffers_with_stage_replicas_are_refused(schedule: Any, replaces: bool) -> None:
    shape, stages = PipelineShape(2, 4, placement="mirror"), normed(2, replaces=replaces)
    if replaces:
        for stage in stages:
            stage.norm.eval()
    with pytest.raises(ExecutionError) as error:
        virtual(schedule, shape, stages).step(*batch(4))
    name = "mean" if replaces else "norm.running_mean"
    assert f"buffer {name} in a forward" in error.value.fact and "eval()" in error.value.hint
    assert str(error.value).splitlines() == [
        f"{schedule.__name__}: ModelError: stage 0 changes its buffer {name} in a forward, and "
        "each of the 2 stage replicas would have different values",
        "  rank 0 #0   F 0.0  failed",
        "  hint: call eval() on its module, or use a placement with one rank for each stage",
    ]
    frozen = [stage.eval() for stage in normed(2)]
    virtual(schedule, shape, frozen).step(*batch(4))


@pytest.mark.parametrize("schedule", [one_f_one_b, zb_h1])
def test_recomputed_batch_norm_is_refused(schedule: Any) -> None:
    with pytest.raises(ExecutionError) as error:
        virtual(schedule, PipelineShape(2, 4), normed(2, again="BatchNorm1d")).step(*batch(4))
    (site,) = error.value.sites
    assert str(error.value).splitlines() == [
        f"{schedule.__name__}: ModelError: stage 1 changes its buffer norm.running_mean in a "
        "backward, such as in a recomputed forward: the schedule decides when",
        f"  rank 1 #{site.index:<3} {site.instr}  failed",
        "  hint: do not checkpoint layers that change buffers",
    ]
    assert str(site.instr)[0] in "BI"


def newest_first(r: int, P: int, m: int) -> RankSchedule:
    """Return forwards and backwards in descending order of the microbatches."""
    descending = [*reversed(range(m))]
    return sum((op.at(mb) for op in (F, B) for mb in descending), 0 * F)


def test_other_microbatch_order_warns_and_equals_its_reference() -> None:
    stages, reference_stages, ordered_stages = (normed(2) for _ in range(3))
    ranks = virtual(newest_first, PipelineShape(2, 4), stages)
    with pytest.warns(UserWarning, match="do not run in the order of the microbatches") as caught:
        ranks.step(*batch(4))
    assert len(caught) == 2  # one per stage
    run_sequential(reference_stages, *batch(4), loss=squares, program=ranks.program)
    run_sequential(ordered_stages, *batch(4), loss=squares)
    assert have_same_bits(buffers(stages), buffers(reference_stages))
    assert not have_same_bits(buffers(stages), buffers(ordered_stages))
    assert have_same_bits(copy_gradients(stages), copy_gradients(reference_stages))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ranks.step(*batch(4))


def _read_warnings(rank: int) -> list[str]:
    program = compile(one_f_one_b, PipelineShape(1, 2), dp=2, progress_model="per_edge")
    transport, messages = GlooTransport(program), []
    for stage in (Normed(0), Normed(0).eval()):
        executor = Executor(program, 0, {0: stage}, transport, loss=squares, boundary=BOUNDARY)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                executor.step(*batch(2))
        messages.append(" ".join(str(w.message) for w in caught))
    return messages


def test_replicas_with_running_statistics_cause_warning() -> None:
    for changing, frozen in run(_read_warnings, 2):
        assert changing.count("each replica has different values") == 1
        assert "norm.running_mean" in changing and frozen == ""


class StridedStage(nn.Module):
    """Returns outputs and gradients that are transposed or strided, and sums its inputs."""

    def __init__(self, k: int, across: bool) -> None:
        super().__init__()
        self.inner, self.across = nn.Linear(SIDE, SIDE), across
        numbers = torch.Generator().manual_seed(k)
        for p in self.inner.parameters():
            p.data = torch.randn(p.shape, generator=numbers) / 8
        make_backward_splittable(self)
        self.layouts: set[tuple[Any, ...]] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.layouts.add((x.stride(), x.storage_offset()))
        rows = torch.cat([torch.ones(1, SIDE), x])
        y = torch.tanh(self.inner(rows) + rows.sum(-1, keepdim=True) / 8)[1:]
        y = y.transpose(0, 1) if self.across else y
        y.register_hook(self._back)
        return y

    def _back(self, dy: Tensor) -> None:
        self.layouts.add((dy.stride(), dy.storage_offset()))


SIDE = 65


@pytest.mark.parametrize("across", [False, True])
def test_layout_is_same_on_one_rank_and_between_ranks(across: bool) -> None:
    """The bits of a sum depend on the memory layout of its terms."""
    x = torch.randn(3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    reference_stages = [StridedStage(k, across) for k in range(4)]
    total = run_sequential(reference_stages, x, x, loss=squares)
    shapes: list[tuple[Any, PipelineShape]] = [
        (interleaved, PipelineShape(4, 3, 1)),  # all values are sent
        (interleaved, PipelineShape(2, 3, 2)),
        (interleaved, PipelineShape(1, 3, 4)),  # all stages on one rank
        (zb_v, PipelineShape(2, 3, 2, "vee")),
    ]
    for schedule, shape in shapes:
        stages = [StridedStage(k, across) for k in range(4)]
        program = compile(schedule, shape, progress_model="per_edge")
        ranks = InProcessExecutor(program, stages, loss=squares, boundary=Boundary((SIDE, SIDE)))
        assert torch.equal(ranks.step(x, x), total)
        assert have_same_bits(copy_gradients(stages), copy_gradients(reference_stages))
        for stage, plain in zip(stages[1:-1], reference_stages[1:-1], strict=True):
            assert stage.layouts == plain.layouts == {((SIDE, 1), 0)}


def test_message_layout_is_contiguous() -> None:
    boundary = Boundary((2, 1, 3))
    for value in (
        torch.randn(3, 1, 2).transpose(0, 2),
        torch.randn(2, 3).as_strided((2, 1, 3), (3, 1, 1)),
        torch.randn(3, 1, 3)[1:],
        torch.randn(3, 1, 3)[:2],
        torch.randn(1, 1, 1).expand(2, 1, 3),
    ):
        contiguous = boundary.to_message_layout(value)
        assert torch.equal(contiguous, value) and contiguous.stride() == (3, 3, 1)
        assert not contiguous.storage_offset()
        assert boundary.to_message_layout(contiguous) is contiguous
        # It keeps no other memory alive.
        assert contiguous.untyped_storage().nbytes() == contiguous.nbytes
