"""Tests of user-defined optimizers with states off the device: the same bits, or one error."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import schedir
from schedir import PipelineShape
from schedir.errors import ExecutionError, ModelError, SchedirError
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.executor_options import ExecutionOptions
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.parameters.mixed_precision import MainOptimizer
from schedir.schedules import interleaved, one_f_one_b, pipedream_2bw
from schedir.testing.tiny_model import WIDTH, make_batch, make_tiny_stages, squared_error
from tests.cases import each_value

torch.set_num_threads(1)
BOUNDARY = Boundary((2, WIDTH), torch.float64)
PLACEMENTS = ("host", "disk", "cpu_step")
SEVERAL_STAGES = (interleaved, PipelineShape(1, 3, 3))
ONE_STAGE_PER_RANK = (one_f_one_b, PipelineShape(2, 3))
DELAYED_UPDATES = (pipedream_2bw, PipelineShape(2, 4, optimizer_steps=2, weight_delay=1))
# `each_value` joins tuples, so each case is in a tuple.
CASES = [(SEVERAL_STAGES,), (ONE_STAGE_PER_RANK,), (DELAYED_UPDATES,)]


class UserOptimizer(torch.optim.Optimizer):
    """A user-defined optimizer; `how` names what its steps do in addition to the update."""

    elementwise = True

    def __init__(self, params: Any, **how: str) -> None:
        super().__init__(params, {"lr": 0.05})
        self.variants = how
        self.number, self.listed, self.counted = 0, [0], torch.zeros(())
        self.groups = [[*group["params"]] for group in self.param_groups]
        if how.get("attribute") != "parameters":
            del self.groups
        if how.get("state") == "views of an attribute":
            self.flat = torch.zeros(100, dtype=torch.float64)
            end = 0
            for p in self._iterate_weights():
                self.state[p]["m"] = self.flat[end : end + p.numel()].view(p.shape)
                end += p.numel()

    def _iterate_weights(self) -> Iterator[nn.Parameter]:
        for group in getattr(self, "groups", [group["params"] for group in self.param_groups]):
            yield from group

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        slower = self._count()
        if self.variants.get("state") == "views of an attribute":
            self.flat.mul_(0.5)
        for p in self._iterate_weights():
            if p.grad is None:
                continue
            change = -0.05 * slower * self._momentum(p)
            match self.variants.get("weights"):
                case "data in place":
                    p.data.add_(change)
                case "data":
                    p.data = p.data + change
                case "set_":
                    p.set_((p + change).clone())
                case "data of another shape":
                    p.data = (p + change)[None]
                case _:
                    p.add_(change)
            match self.variants.get("gradient"):
                case "none":
                    p.grad = None
                case "new":
                    p.grad = torch.full_like(p, torch.nan)
                case "zero":
                    p.grad.zero_()
        match self.variants.get("group"):
            case "added":
                self.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
            case "swapped":
                first = self.param_groups[0]["params"]
                first[0] = nn.Parameter(first[0].detach())

    def _count(self) -> float:
        """Count the step, and return the factor of its update, which depends on the count."""
        match self.variants.get("count"):
            case "number":
                self.number += 1
                return 1 / self.number
            case "list":
                self.listed[0] += 1
                return 1 / self.listed[0]
            case "length":
                self.listed.append(1)
                return 1 / (len(self.listed) - 1)
            case "tensor":
                self.counted += 1
                return 1 / float(self.counted)
            case "group":
                for group in self.param_groups:
                    group["n"] = group.get("n", torch.zeros(())) + 1
                return 1 / float(self.param_groups[0]["n"])
            case "state":
                state: Any = self.state
                state["all"]["n"] = state["all"].get("n", 0) + 1
                return float(1 / state["all"]["n"])
        return 1.0

    def _momentum(self, p: nn.Parameter) -> Any:
        assert p.grad is not None
        state = self.state[p] if self.variants.get("state") else {}
        match self.variants.get("state"):
            case "replaced":
                state["m"] = 0.5 * state.get("m", torch.zeros_like(p)) + p.grad
            case "in a new dict":
                m = 0.5 * state.get("m", torch.zeros_like(p)) + p.grad
                other = [torch.ones(3), {"n": torch.ones((), dtype=torch.int64)}]
                self.state[p] = {"m": m, "other": other}
                return m
            case "deleted":
                state["n"] = state.get("n", 0) + 1
                if state["n"] == 2:
                    del self.state[p]
                return p.grad * float(state["n"])
            case "late":
                state["n"] = state.get("n", 0) + 1
                if state["n"] > 1:
                    state.setdefault("m", torch.zeros_like(p)).mul_(0.5).add_(p.grad)
            case "data":
                state.setdefault("m", torch.zeros_like(p)).data = 0.5 * p.grad
            case "data in another order":
                if "m" in state:
                    state["m"].data = (0.5 * state["m"] + p.grad).t().contiguous().t()
                else:
                    state["m"] = p.grad.clone()
            case "two views":
                state.setdefault("m", torch.zeros_like(p)).mul_(0.5)
                state.setdefault("v", state["m"].view(-1)).add_(p.grad.reshape(-1))
            case "gradient":
                m = p.grad + 0.1 * state.get("m", 0.0)
                state["m"] = p.grad
                return m
            case "weights":
                m = p.grad + 0.1 * state.get("m", 0.0)
                state["m"] = p.detach()
                return m
            case "views of an attribute":
                state["m"].add_(p.grad)
            case "one for all":
                others = (of_weight["m"] for of_weight in self.state.values() if "m" in of_weight)
                state["m"] = next(others, torch.zeros(()))
                state["m"] += 1
                return p.grad / float(state["m"])
        return state.get("m", p.grad)


VARIANTS: dict[str, list[str]] = {
    "weights": ["in place", "data in place", "data", "set_", "data of another shape"],
    "gradient": ["left", "none", "new", "zero"],
    "count": ["", "number", "list", "length", "tensor", "group", "state"],
    "state": [
        "", "replaced", "in a new dict", "deleted", "late", "data", "data in another order",
        "two views", "gradient", "weights", "views of an attribute", "one for all",
    ],
    "group": ["", "added", "swapped"],
    "attribute": ["", "parameters"],
}  # fmt: skip


def train_three_steps(
    case: Any, make: Callable[[Any], Any], states: str, **how: Any
) -> list[Tensor]:
    """Return the weights after three steps."""
    schedule, shape = case
    program = schedir.compile(
        schedule, shape, progress_model="per_edge", optimizer_placement=states, **how
    )
    execution = ExecutionOptions(spill_dir="." if states == "disk" else None)
    stages = make_tiny_stages(shape.stages)
    world = InProcessExecutor(
        program, stages, loss=squared_error, boundary=BOUNDARY, optimizer=make, execution=execution
    )
    for k in range(3):
        world.step(*make_batch(shape.microbatches, k))
    return [p.detach().flatten().clone() for stage in stages for p in stage.parameters()]


def compare_with_device(
    case: Any, states: str, how: dict[str, str], **options: Any
) -> ModelError | ExecutionError | None:
    """Return the error that refuses an optimizer, or None if it has the bits of device steps."""
    make = partial(UserOptimizer, **how)
    try:
        weights = train_three_steps(case, make, states, **options)
    except (ModelError, ExecutionError) as error:
        assert error.hint
        return error
    assert all(map(torch.equal, weights, train_on_device(case, tuple(how.items()))))
    return None


@cache
def train_on_device(case: Any, how: tuple[tuple[str, str], ...]) -> list[Tensor]:
    return train_three_steps(case, partial(UserOptimizer, **dict(how)), "device")


@pytest.fixture(autouse=True)
def _change_to_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_optimizer_has_same_bits_or_is_refused(data: Any) -> None:
    how = {
        name: data.draw(st.one_of(st.just(kinds[0]), st.sampled_from(kinds)), name)
        for name, kinds in VARIANTS.items()
    }
    states = data.draw(st.sampled_from(PLACEMENTS))
    (case,) = data.draw(st.sampled_from(CASES if states == "cpu_step" else CASES[:2]))
    zero = data.draw(st.sampled_from([0, 2])) if case is not DELAYED_UPDATES else 0
    if how["weights"] == "data of another shape":
        states, zero = "cpu_step", 0  # elsewhere torch refuses it in the next forward
    refused = compare_with_device(case, states, how, **({"zero": zero} if zero else {}))
    event("refused" if refused else "the same bits")


MOVED = PLACEMENTS[:2]
CHANGED_STATES = [
    "replaced", "data in another order", "in a new dict", "deleted", "late", "data",
]  # fmt: skip
# A step count that changes the update is right if a rank has only one stage.
COUNTS = each_value(PLACEMENTS, VARIANTS["count"][1:])
ALLOWED: list[tuple[Any, str, dict[str, str]]] = [
    *((case, "cpu_step", {"gradient": g}) for case, g in each_value(CASES, VARIANTS["gradient"])),
    *((SEVERAL_STAGES, states, {"weights": w}) for states in MOVED for w in ("data", "set_")),
    *(
        (SEVERAL_STAGES, states, {"state": s})
        for states, s in each_value(PLACEMENTS, CHANGED_STATES)
    ),
    *((ONE_STAGE_PER_RANK, states, {"count": count}) for states, count in COUNTS),
    *((ONE_STAGE_PER_RANK, states, {"attribute": "parameters"}) for states in MOVED),
]


@pytest.mark.parametrize(("case", "states", "how"), ALLOWED)
def test_optimizer_variant_has_same_bits(case: Any, states: str, how: dict[str, str]) -> None:
    assert compare_with_device(case, states, how) is None


VIEWS = {"state": "views of an attribute"}
CHANGED_COUNT = r"changes (the length of )?(its|'n' of) "
SHARED_STATES = ["two views", "gradient", "weights", "one for all"]
REFUSED: list[tuple[Any, str, dict[str, str], Any, str]] = [
    *((case, "cpu_step", {"weights": w}, ExecutionError, "weight of stage.*host_step")
      for case, w in each_value(CASES, ["data", "set_", "data of another shape"])),
    *((SEVERAL_STAGES, states, {"state": state}, SchedirError, "")
      for states in MOVED for state in SHARED_STATES),
    *((SEVERAL_STAGES, states, VIEWS, ModelError, r"clone\(\)")
      for states in ("device", *PLACEMENTS)),
    *((SEVERAL_STAGES, states, {"count": count}, SchedirError, CHANGED_COUNT)
      for states, count in COUNTS),
    *((ONE_STAGE_PER_RANK, states, {"group": group}, SchedirError, "changes its list of parameters")
      for states, group in each_value(PLACEMENTS, ["added", "swapped"])),
    *((SEVERAL_STAGES, states, {"attribute": "parameters"}, ModelError, "")
      for states in PLACEMENTS),
    (ONE_STAGE_PER_RANK, "cpu_step", {"attribute": "parameters"}, ModelError, ""),
]  # fmt: skip


@pytest.mark.parametrize(("case", "states", "how", "kind", "text"), REFUSED)
def test_optimizer_variant_is_refused(
    case: Any, states: str, how: dict[str, str], kind: type[SchedirError], text: str
) -> None:
    """States on the device are sharded."""
    refused = compare_with_device(case, states, how, **{"zero": 1} if states == "device" else {})
    assert isinstance(refused, kind) and re.search(text, str(refused), re.S)


class OuterOptimizer(UserOptimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params := [*params])
        self.inner = torch.optim.SGD(params, lr=0.05, momentum=0.9)

    def step(self, closure: Any = None) -> Any:
        self.inner.step()


class DerivedMainOptimizer(MainOptimizer):
    pass


def make_with_replaced_step(params: Any) -> torch.optim.Optimizer:
    optimizer: Any = torch.optim.SGD(params, lr=0.05)
    optimizer.step = lambda: None
    return optimizer  # type: ignore[no-any-return]


def make_with_scheduler(params: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(params, lr=0.05)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return optimizer


@pytest.mark.parametrize("states", PLACEMENTS)
def test_replaced_step_method_is_refused(states: str) -> None:
    for make in (OuterOptimizer, make_with_replaced_step):
        with pytest.raises(ModelError) as error:
            train_three_steps(SEVERAL_STAGES, make, states)
        assert error.value.hint and error.value.program == "interleaved"
    weights = [
        train_three_steps(SEVERAL_STAGES, make_with_scheduler, placement)
        for placement in ("device", states)
    ]
    assert all(map(torch.equal, *weights))


@pytest.mark.parametrize(
    "make",
    [lambda own: DerivedMainOptimizer(own, torch.optim.AdamW), make_with_replaced_step],
    ids=["derived", "replaced"],
)
def test_post_validation_needs_known_step_method(make: Any) -> None:
    """A derived MainOptimizer and an optimizer with a replaced `step` are refused."""
    after_step: Any = partial(
        train_three_steps, ONE_STAGE_PER_RANK, states="device", norm_check="after_step",
        clip_grad_norm=True,
    )  # fmt: skip
    with pytest.raises(ModelError) as error:
        after_step(make)
    assert "'before_step'" in error.value.hint
    assert after_step(make_with_scheduler)
