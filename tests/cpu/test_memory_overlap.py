"""Tests that tensors that share memory are found, and refused if they are trained separately."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import schedir
from schedir import PipelineShape
from schedir.errors import ModelError
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.executor_options import ExecutionOptions
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.model_checks.memory_overlap import find_overlaps
from schedir.runtime.parameters.mixed_precision import MainOptimizer
from schedir.schedules import chimera, forward_only, interleaved, one_f_one_b, pipedream_2bw
from schedir.testing.tiny_model import WIDTH, make_batch, squared_error

torch.set_num_threads(1)
BOUNDARY = Boundary((2, WIDTH), torch.float64)
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


@st.composite
def views(draw: Any) -> tuple[Tensor, set[tuple[int, int]]]:
    """Draw a view of one of two storages, and the set of their elements that it contains."""
    storage = draw(st.integers(0, 1))
    shape = draw(st.lists(st.integers(0, 3), max_size=2))
    strides = [draw(st.integers(0, 4)) for _ in shape]
    offset = draw(st.integers(0, 8))
    last = offset + sum(max(n - 1, 0) * stride for n, stride in zip(shape, strides, strict=True))
    assert last < 32
    numbers = torch.arange(32).as_strided(shape, strides, offset).flatten().tolist()
    return MEMORY[storage].as_strided(shape, strides, offset), {(storage, n) for n in numbers}


MEMORY = [torch.zeros(32), torch.zeros(32)]


@given(st.lists(views(), max_size=6))
def test_tensors_with_common_element_overlap(drawn: Any) -> None:
    tensors, numbers = [t for t, _ in drawn], [elements for _, elements in drawn]
    indices = range(len(drawn))
    expected = [(a, b) for a in indices for b in indices if a < b and numbers[a] & numbers[b]]
    assert sorted(find_overlaps(tensors)) == expected


def test_tensors_without_dense_memory_do_not_overlap() -> None:
    t = torch.zeros(4)
    freed = torch.zeros(4), torch.zeros(4)
    for tensor in freed:
        tensor.untyped_storage().resize_(0)
    sparse = torch.zeros(4).to_sparse()
    meta = torch.zeros(4, device="meta")
    tensors = [*freed, sparse, sparse, meta, meta[:2], torch.zeros(0)]
    assert [*find_overlaps([t, t, *tensors])] == []
    assert [*find_overlaps([*tensors, t, t.view(torch.int64)])] == [(7, 8)]


class MatrixStage(nn.Module):
    """Multiplies by a matrix, and by another tensor that is a parameter or of another kind."""

    def __init__(self, seed: int, also: Tensor | None = None, kind: str = "parameter") -> None:
        super().__init__()
        numbers = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=numbers).double())
        if also is not None and kind == "buffer":
            self.register_buffer("also", also)
        elif also is not None:
            self.also = also if kind == "attribute" else nn.Parameter(also, kind != "frozen")

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.tanh(x @ self.weight)
        also: Tensor | None = getattr(self, "also", None)
        if also is None:
            return y
        return y * also if also.dim() == 1 else torch.tanh(y @ also)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "a row": lambda t: t[1],
    "a column": lambda t: t[:, 1],
    "transposed": lambda t: t.t(),
    "all of it": lambda t: t,
}


def make_three_stages(view: str, kind: str) -> list[nn.Module]:
    """Return three stages. The last one has a view of the weight of the first one."""
    first = MatrixStage(0)
    return [first, MatrixStage(1), MatrixStage(2, VIEWS[view](first.weight.data), kind)]


def make_ranks(
    shape: PipelineShape, stages: list[nn.Module], optimizer: Any = SGD, **options: Any
) -> InProcessExecutor:
    tied = options.pop("tied_weights", None)
    schedule = options.pop("schedule", one_f_one_b if shape.stages_per_rank == 1 else interleaved)
    program = schedir.compile(
        schedule, shape, progress_model="per_edge", tied_weights=tied or False, **options
    )
    folder = "." if options.get("optimizer_placement") == "disk" else None
    execution = ExecutionOptions(spill_dir=folder)
    return InProcessExecutor(
        program, stages, loss=squared_error, boundary=BOUNDARY, optimizer=optimizer,
        tied_weights=tied, execution=execution,
    )  # fmt: skip


def train(ranks: InProcessExecutor, stages: list[nn.Module]) -> list[Tensor]:
    """Return the weights of stages after three steps."""
    for k in range(3):
        ranks.step(*make_batch(4, k))
    return copy_weights(stages)


@pytest.mark.parametrize("kind", ["parameter", "frozen", "buffer", "attribute"])
@pytest.mark.parametrize("view", VIEWS)
def test_view_of_weight_of_another_rank_is_refused(view: str, kind: str) -> None:
    with pytest.raises(ModelError) as error:
        make_ranks(PipelineShape(3, 4), make_three_stages(view, kind))
    assert error.value.program == "one_f_one_b"
    assert "weight of stage 0" in error.value.fact and "also of stage 2" in error.value.fact
    assert ".clone()" in error.value.hint


def test_tied_weights_in_one_memory_of_two_ranks_are_refused() -> None:
    """Both ranks would update the same memory."""
    stages: list[Any] = [MatrixStage(0), MatrixStage(1)]
    stages[1].weight = nn.Parameter(stages[0].weight.data)
    ties = schedir.TiedWeights((((0, "weight"), (1, "weight")),))
    with pytest.raises(ModelError) as error:
        make_ranks(PipelineShape(2, 4), stages, tied_weights=ties)
    assert "share memory" in error.value.fact


def copy_weights(stages: list[nn.Module]) -> list[Tensor]:
    return [p.detach() for stage in stages for p in stage.parameters()]


def train_plain_loop(stages: list[nn.Module], microbatches: int) -> list[Tensor]:
    """Return the weights after three steps of a plain loop."""
    optimizer = SGD(dict.fromkeys(p for stage in stages for p in stage.parameters()))
    for k in range(3):
        optimizer.zero_grad()
        for x, target in zip(*make_batch(microbatches, k), strict=True):
            squared_error(nn.Sequential(*stages)(x), target).backward()
        optimizer.step()
    return copy_weights(stages)


@pytest.mark.parametrize("view", ["a row", "a column", "transposed"])
def test_view_of_weight_of_one_rank_trains_like_plain_loop(view: str) -> None:
    stages = make_three_stages(view, "parameter")
    weights = train(make_ranks(PipelineShape(1, 4, 3), stages), stages)
    assert all(map(torch.equal, weights, train_plain_loop(make_three_stages(view, "parameter"), 4)))


def test_untrained_memory_may_be_shared() -> None:
    memory = torch.randn(3, WIDTH).double()
    for kind in ("frozen", "buffer", "attribute"):
        make_ranks(
            PipelineShape(2, 4), [MatrixStage(0, memory[0], kind), MatrixStage(1, memory[0], kind)]
        )
    make_ranks(
        PipelineShape(2, 4), [MatrixStage(0, memory[0]), MatrixStage(1, memory[1])]
    )  # parts of one memory
    program = schedir.compile(forward_only, PipelineShape(3, 4))
    InProcessExecutor(
        program, make_three_stages("a row", "parameter"), loss=squared_error, boundary=BOUNDARY
    ).step(*make_batch(4))


@pytest.mark.parametrize("kind", ["frozen", "buffer", "attribute"])
def test_view_of_weight_with_versions_is_refused(kind: str) -> None:
    """Forwards use copies of older weights, but the view shows the newest weights."""

    def make_stages() -> list[nn.Module]:
        modules: list[Any] = [MatrixStage(0), MatrixStage(1)]
        view = modules[0].weight.data[0]
        modules[0] = nn.Sequential(modules[0], MatrixStage(2, view, kind))
        return modules

    with pytest.raises(ModelError) as error:
        shape = PipelineShape(2, 4, optimizer_steps=2, weight_delay=1)
        make_ranks(shape, make_stages(), schedule=pipedream_2bw)
    assert "0.weight of stage 0" in error.value.fact and "1.also of stage 0" in error.value.fact
    assert "delay=0" in error.value.hint
    make_ranks(PipelineShape(2, 4), make_stages()).step(*make_batch(4))


@pytest.mark.parametrize("shape", [PipelineShape(1, 4, 3), PipelineShape(1, 4)])
@pytest.mark.parametrize("states", ["host", "disk", "cpu_step"])
@pytest.mark.parametrize("view", ["a row", "a column", "transposed"])
def test_parameters_in_one_memory_are_refused_with_offload(
    view: str, states: str, shape: PipelineShape, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stages = make_three_stages(view, "parameter")
    if shape.stages == 1:
        stages = [nn.Sequential(*stages)]
    with pytest.raises(ModelError) as error:
        make_ranks(shape, stages, optimizer_placement=states)
    assert "weight of stage 0" in error.value.fact and "also of stage" in error.value.fact
    assert error.value.program and "'device'" in error.value.hint


@pytest.mark.parametrize("states", ["host", "cpu_step"])
def test_weights_that_later_share_memory_are_refused(states: str) -> None:
    stages: list[Any] = [MatrixStage(0), MatrixStage(1)]
    ranks = make_ranks(PipelineShape(1, 4, 2), stages, optimizer_placement=states)
    ranks.step(*make_batch(4))
    original_data = stages[1].weight.data
    stages[1].weight.data = stages[0].weight.data
    with pytest.raises(ModelError, match="share memory"):
        ranks.step(*make_batch(4))
    stages[1].weight.data = original_data
    ranks.step(*make_batch(4))


def test_frozen_view_shows_weights_of_host_steps() -> None:
    results = []
    for states in ("device", "host", "cpu_step"):
        stages = make_three_stages("a row", "frozen")
        ranks = make_ranks(PipelineShape(1, 4, 3), stages, optimizer_placement=states)
        results.append(train(ranks, stages))
    for placed in results[1:]:
        assert all(map(torch.equal, results[0], placed))


def test_main_optimizer_with_weight_twice_is_refused() -> None:
    """The optimizer has two main copies, and would write only the last one to the weight."""
    stages = make_three_stages("all of it", "parameter")
    with pytest.raises(ModelError, match="twice"):
        make_ranks(PipelineShape(1, 4, 3), stages, partial(MainOptimizer, make_optimizer=SGD))


class KeepsView(MatrixStage):
    """Keeps a view of its weight in an attribute, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__(0)
        view = self.weight.detach()[0]
        self._kept: Any
        if how == "buffer":
            self.register_buffer("_kept", view)
        else:
            values = {"private": view, "list": [view], "tuple": (0, (view,)), "dict": {"a": [view]}}
            self._kept = values[how]

    def forward(self, x: Tensor) -> Tensor:
        (view,) = (t for t in tree_leaves(self._kept) if isinstance(t, Tensor))
        return super().forward(x) * view


NAMES = {"private": "_kept", "list": "_kept[0]", "tuple": "_kept[1][0]", "dict": "_kept['a'][0]"}


@pytest.mark.parametrize("how", NAMES)
@pytest.mark.parametrize("level", [1, 3])
def test_view_of_sharded_weight_is_refused(level: int, how: str) -> None:
    with pytest.raises(ModelError) as error:
        make_ranks(PipelineShape(1, 4, 2), [KeepsView(how), MatrixStage(1)], zero=level)
    assert error.value.fact.startswith(
        f"{NAMES[how]} of stage 0 and weight of stage 0 share memory, but ZeRO"
    )
    make_ranks(PipelineShape(1, 4, 2), [KeepsView(how), MatrixStage(1)]).step(*make_batch(4))


@pytest.mark.parametrize("how", NAMES)
def test_view_of_weight_with_stage_replicas_is_refused(how: str) -> None:
    """In a stage replica the view would have separate memory with the initial values."""
    mirror = PipelineShape(2, 4, placement="mirror")
    with pytest.raises(ModelError) as error:
        make_ranks(mirror, [MatrixStage(1), KeepsView(how)], schedule=chimera)
    assert error.value.fact.startswith(f"{NAMES[how]} of stage 1 and weight of stage 1 share")
    assert "their copies in stage replicas would not" in error.value.fact and error.value.hint


def test_buffer_view_is_copied_to_replicas_before_each_step() -> None:
    stages: list[nn.Module] = [KeepsView("buffer"), MatrixStage(1)]
    ranks = make_ranks(PipelineShape(2, 4, placement="mirror"), stages, schedule=chimera)
    expected = train_plain_loop([KeepsView("buffer"), MatrixStage(1)], 4)
    torch.testing.assert_close(train(ranks, stages), expected)


class Recurrent(nn.Module):
    """An LSTM, whose parameters are also in a private list."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(WIDTH, WIDTH, batch_first=True).double()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.cell(x.unsqueeze(0))[0].squeeze(0)
        return y


def test_list_of_parameters_is_accepted() -> None:
    make_ranks(PipelineShape(1, 4, 2), [Recurrent(), MatrixStage(1)], zero=1).step(*make_batch(4))
    stages: list[nn.Module] = [Recurrent(), MatrixStage(1)]
    make_ranks(PipelineShape(2, 4, placement="mirror"), stages, schedule=chimera).step(
        *make_batch(4)
    )
