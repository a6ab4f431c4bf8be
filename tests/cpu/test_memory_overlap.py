"""Tests that tensors which share memory are found, and refused if trained separately."""

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
from schedir.ir.pipeline.tied_weights import find_tied_weights
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
    which = draw(st.integers(0, 1))
    shape = draw(st.lists(st.integers(0, 3), max_size=2))
    strides = [draw(st.integers(0, 4)) for _ in shape]
    at = draw(st.integers(0, 8))
    last = at + sum(max(n - 1, 0) * stride for n, stride in zip(shape, strides, strict=True))
    assert last < 32
    numbers = torch.arange(32).as_strided(shape, strides, at).flatten().tolist()
    return MEMORY[which].as_strided(shape, strides, at), {(which, n) for n in numbers}


MEMORY = [torch.zeros(32), torch.zeros(32)]


@given(st.lists(views(), max_size=6))
def test_two_tensors_overlap_if_they_have_a_number_in_common(drawn: Any) -> None:
    tensors, numbers = [t for t, _ in drawn], [own for _, own in drawn]
    each = range(len(drawn))
    wanted = [(a, b) for a in each for b in each if a < b and numbers[a] & numbers[b]]
    assert sorted(find_overlaps(tensors)) == wanted


def test_what_has_no_memory_of_its_own_overlaps_with_nothing() -> None:
    t = torch.zeros(4)
    gone = torch.zeros(4), torch.zeros(4)
    for one in gone:
        one.untyped_storage().resize_(0)
    sparse = torch.zeros(4).to_sparse()
    meta = torch.zeros(4, device="meta")
    others = [*gone, sparse, sparse, meta, meta[:2], torch.zeros(0)]
    assert [*find_overlaps([t, t, *others])] == []
    assert [*find_overlaps([*others, t, t.view(torch.int64)])] == [(7, 8)]


# ---------------------------------------------------------------- stages that share memory


class Times(nn.Module):
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


def three(view: str, kind: str) -> list[nn.Module]:
    """Return three stages, of which the last has a view of the first's weight."""
    first = Times(0)
    return [first, Times(1), Times(2, VIEWS[view](first.weight.data), kind)]


def ranks_of(
    shape: PipelineShape, stages: list[nn.Module], optimizer: Any = SGD, **how: Any
) -> InProcessExecutor:
    tied = how.pop("tied_weights", None)
    schedule = how.pop("schedule", one_f_one_b if shape.stages_per_rank == 1 else interleaved)
    program = schedir.compile(
        schedule, shape, progress_model="per_edge", tied_weights=tied or False, **how
    )
    folder = "." if how.get("optimizer_placement") == "disk" else None
    return InProcessExecutor(
        program,
        stages,
        loss=squared_error,
        boundary=BOUNDARY,
        optimizer=optimizer,
        tied_weights=tied,
        execution=ExecutionOptions(spill_dir=folder),
    )


@pytest.mark.parametrize("kind", ["parameter", "frozen", "buffer", "attribute"])
@pytest.mark.parametrize("view", VIEWS)
def test_memory_of_a_weight_of_another_rank_is_refused(view: str, kind: str) -> None:
    with pytest.raises(ModelError) as error:
        ranks_of(PipelineShape(3, 4), three(view, kind))
    assert error.value.program == "one_f_one_b"
    assert "weight of stage 0" in error.value.fact and "also of stage 2" in error.value.fact
    assert ".clone()" in error.value.hint


def test_memory_of_another_rank_is_refused_also_of_what_is_said_to_be_tied() -> None:
    """Both ranks would step the same memory."""
    stages: list[Any] = [Times(0), Times(1)]
    stages[1].weight = nn.Parameter(stages[0].weight.data)
    same = schedir.TiedWeights((((0, "weight"), (1, "weight")),))
    with pytest.raises(ModelError) as error:
        ranks_of(PipelineShape(2, 4), stages, tied_weights=same)
    assert "share memory" in error.value.fact


def weights(stages: list[nn.Module]) -> list[Tensor]:
    return [p.detach() for stage in stages for p in stage.parameters()]


def plain(stages: list[nn.Module], microbatches: int) -> list[Tensor]:
    """Return the weights after three steps of a plain loop."""
    optimizer = SGD(dict.fromkeys(p for stage in stages for p in stage.parameters()))
    for k in range(3):
        optimizer.zero_grad()
        for x, target in zip(*make_batch(microbatches, k), strict=True):
            squared_error(nn.Sequential(*stages)(x), target).backward()
        optimizer.step()
    return weights(stages)


@pytest.mark.parametrize("view", ["a row", "a column", "transposed"])
def test_memory_of_a_weight_of_the_same_rank_is_that_of_a_plain_loop(view: str) -> None:
    stages = three(view, "parameter")
    ranks = ranks_of(PipelineShape(1, 4, 3), stages)
    for k in range(3):
        ranks.step(*make_batch(4, k))
    assert all(map(torch.equal, weights(stages), plain(three(view, "parameter"), 4)))


def test_memory_that_nobody_trains_may_be_shared() -> None:
    memory = torch.randn(3, WIDTH).double()
    for kind in ("frozen", "buffer", "attribute"):
        ranks_of(PipelineShape(2, 4), [Times(0, memory[0], kind), Times(1, memory[0], kind)])
    ranks_of(PipelineShape(2, 4), [Times(0, memory[0]), Times(1, memory[1])])  # parts of one memory
    program = schedir.compile(forward_only, PipelineShape(3, 4))
    InProcessExecutor(
        program, three("a row", "parameter"), loss=squared_error, boundary=BOUNDARY
    ).step(*make_batch(4))


def test_one_parameter_of_several_ranks_is_a_tie() -> None:
    stages: list[Any] = [Times(0), Times(1), Times(2)]
    stages[2].weight = stages[0].weight
    ranks = ranks_of(PipelineShape(3, 4), stages, tied_weights=find_tied_weights(stages))
    before = weights(stages)[0].clone()
    ranks.step(*make_batch(4))
    assert stages[2].weight is stages[0].weight and not torch.equal(before, stages[0].weight)


@pytest.mark.parametrize("kind", ["frozen", "buffer", "attribute"])
def test_a_view_of_a_weight_that_has_older_versions_is_refused(kind: str) -> None:
    """Forwards use copies of older weights, while the view is of the newest."""

    def stages() -> list[nn.Module]:
        found: list[Any] = [Times(0), Times(1)]
        view = found[0].weight.data[0]
        found[0] = nn.Sequential(found[0], Times(2, view, kind))
        return found

    with pytest.raises(ModelError) as error:
        ranks_of(
            PipelineShape(2, 4, optimizer_steps=2, weight_delay=1), stages(), schedule=pipedream_2bw
        )
    assert "0.weight of stage 0" in error.value.fact and "1.also of stage 0" in error.value.fact
    assert "delay=0" in error.value.hint
    ranks_of(PipelineShape(2, 4), stages()).step(*make_batch(4))


# ---------------------------------------------------------------- states off the device


@pytest.mark.parametrize("shape", [PipelineShape(1, 4, 3), PipelineShape(1, 4)])
@pytest.mark.parametrize("states", ["host", "disk", "cpu_step"])
@pytest.mark.parametrize("view", ["a row", "a column", "transposed"])
def test_two_parameters_in_one_memory_are_refused(
    view: str, states: str, shape: PipelineShape, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stages = three(view, "parameter")
    if shape.stages == 1:
        stages = [nn.Sequential(*stages)]
    with pytest.raises(ModelError) as error:
        ranks_of(shape, stages, optimizer_placement=states)
    assert "weight of stage 0" in error.value.fact and "also of stage" in error.value.fact
    assert error.value.program and "'device'" in error.value.hint


@pytest.mark.parametrize("states", ["host", "cpu_step"])
def test_data_that_is_set_to_the_memory_of_another_is_refused_in_the_next_step(states: str) -> None:
    stages: list[Any] = [Times(0), Times(1)]
    ranks = ranks_of(PipelineShape(1, 4, 2), stages, optimizer_placement=states)
    ranks.step(*make_batch(4))
    own = stages[1].weight.data
    stages[1].weight.data = stages[0].weight.data
    with pytest.raises(ModelError, match="share memory"):
        ranks.step(*make_batch(4))
    stages[1].weight.data = own
    ranks.step(*make_batch(4))


def test_a_view_that_is_not_stepped_sees_what_the_host_steps() -> None:
    found = []
    for states in ("device", "host", "cpu_step"):
        stages = three("a row", "frozen")
        ranks = ranks_of(PipelineShape(1, 4, 3), stages, optimizer_placement=states)
        for k in range(3):
            ranks.step(*make_batch(4, k))
        found.append(weights(stages))
    assert all(map(torch.equal, found[0], found[1])) and all(map(torch.equal, found[0], found[2]))


def test_a_main_optimizer_that_has_a_weight_twice_is_refused() -> None:
    """The optimizer has separate copies, and would round only the last one into the weight."""
    stages = three("all of it", "parameter")
    with pytest.raises(ModelError, match="twice"):
        ranks_of(PipelineShape(1, 4, 3), stages, partial(MainOptimizer, make_optimizer=SGD))


# ---------------------------------------------------------------- where a view is kept


class Keeps(Times):
    """Keeps a view of its weight in an attribute, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__(0)
        view = self.weight.detach()[0]
        kept: dict[str, Any] = {
            "private": view,
            "list": [view],
            "tuple": (0, (view,)),
            "dict": {"a": [view]},
        }
        if how == "buffer":
            self.register_buffer("_kept", view)
        else:
            self._kept = kept[how]

    def forward(self, x: Tensor) -> Tensor:
        (view,) = (t for t in tree_leaves(self._kept) if isinstance(t, Tensor))
        return super().forward(x) * view


NAMES = {"private": "_kept", "list": "_kept[0]", "tuple": "_kept[1][0]", "dict": "_kept['a'][0]"}


@pytest.mark.parametrize("how", NAMES)
@pytest.mark.parametrize("level", [1, 3])
def test_a_view_that_is_not_cut_with_its_weight_is_refused(level: int, how: str) -> None:
    with pytest.raises(ModelError) as error:
        ranks_of(PipelineShape(1, 4, 2), [Keeps(how), Times(1)], zero=level)
    assert error.value.fact.startswith(
        f"{NAMES[how]} of stage 0 and weight of stage 0 share memory, but ZeRO"
    )
    ranks_of(PipelineShape(1, 4, 2), [Keeps(how), Times(1)]).step(*make_batch(4))


@pytest.mark.parametrize("how", NAMES)
def test_a_view_that_is_copied_with_its_stage_is_refused(how: str) -> None:
    """In the copy of another holder the view would have separate memory with initial values."""
    mirror = PipelineShape(2, 4, placement="mirror")
    with pytest.raises(ModelError) as error:
        ranks_of(mirror, [Times(1), Keeps(how)], schedule=chimera)
    assert error.value.fact.startswith(f"{NAMES[how]} of stage 1 and weight of stage 1 share")
    assert "their copies in stage replicas would not" in error.value.fact and error.value.hint


def test_a_buffer_is_copied_before_each_step() -> None:
    stages: list[nn.Module] = [Keeps("buffer"), Times(1)]
    ranks = ranks_of(PipelineShape(2, 4, placement="mirror"), stages, schedule=chimera)
    for k in range(3):
        ranks.step(*make_batch(4, k))
    for one, other in zip(weights(stages), plain([Keeps("buffer"), Times(1)], 4), strict=True):
        torch.testing.assert_close(one, other)


class Recurrent(nn.Module):
    """An LSTM, which also has its Parameters in a private list."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(WIDTH, WIDTH, batch_first=True).double()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.cell(x.unsqueeze(0))[0].squeeze(0)
        return y


def test_a_list_of_parameters_is_no_view() -> None:
    ranks_of(PipelineShape(1, 4, 2), [Recurrent(), Times(1)], zero=1).step(*make_batch(4))
    stages: list[nn.Module] = [Recurrent(), Times(1)]
    ranks_of(PipelineShape(2, 4, placement="mirror"), stages, schedule=chimera).step(*make_batch(4))
