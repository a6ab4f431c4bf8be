"""Tests of checkpoints of virtual ranks, with any stages, optimizers and dtypes."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import schedir
from schedir import PipelineShape
from schedir.checkpoints import load, save
from schedir.errors import CheckpointError, ExecutionError
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.executor_options import GradientOptions
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.parameters.mixed_precision import LossScale
from schedir.schedules import gpipe, interleaved, looped_bfs, one_f_one_b
from schedir.schedules.schedule_expansion import expand_schedule as draft_of
from schedir.testing import compute_programs
from tests.cases import cases
from tests.cpu.checkpoint_layouts import (
    Layout,
    Model,
    create_in_process_executor,
    keep_name,
    read_checkpoint_tensors,
    run_steps,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoints_refused.txt"
ADAM = partial(torch.optim.AdamW, lr=1e-2)
OPTIMIZERS = {
    "AdamW": ADAM,
    "amsgrad": partial(torch.optim.AdamW, lr=1e-2, amsgrad=True),
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adagrad": torch.optim.Adagrad,
    "NAdam": torch.optim.NAdam,
    "ASGD": torch.optim.ASGD,
    "Rprop": torch.optim.Rprop,
}


class MixedStage(nn.Module):
    """A stage with frozen, empty, scalar and twice registered parameters, and with buffers."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)
        self.last = nn.Linear(3, 4)
        self.one = nn.Parameter(torch.randn(()))
        self.none = nn.Parameter(torch.zeros(0, 3))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.again = self.last
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.randn(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
        y: Tensor = self.again(self.norm(torch.tanh(self.first(x))) * self.one + self.frozen)
        return y + self.none.sum()


def make_mixed_stages(stages: int, seed: int, *, writes: bool = True) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [MixedStage().train(writes) for _ in range(stages)]


def make_ranks_of_draft(
    draft: Any, stages: list[nn.Module], optimizer: Any = ADAM, zero: int = 0, **options: Any
) -> InProcessExecutor:
    clip = options.pop("clip_grad_norm", True)
    program = schedir.compile(draft, zero=zero, clip_grad_norm=clip, **options.pop("of", {}))
    defaults: dict[str, Any] = {"loss": nn.functional.mse_loss, "boundary": (5, 4)}
    return InProcessExecutor(program, stages, **defaults | {"optimizer": optimizer} | options)


SHAPE, ONE_RANK = PipelineShape(2, 3), PipelineShape(1, 3, 2)


def make_linear_stages(*kinds: Any) -> list[nn.Module]:
    torch.manual_seed(0)
    return [kind(4, 4) for kind in kinds or (nn.Linear, nn.Linear)]


def make_ranks(
    stages: list[nn.Module] | None = None, optimizer: Any = ADAM, shape: PipelineShape = SHAPE,
    schedule: Any = None, **options: Any,
) -> InProcessExecutor:  # fmt: skip
    schedule = schedule or (looped_bfs if shape.stages_per_rank > 1 else one_f_one_b)
    stages = make_linear_stages() if stages is None else stages
    return make_ranks_of_draft(draft_of(schedule, shape), stages, optimizer, **options)


def run_random_steps(ranks: InProcessExecutor, first: int, end: int) -> None:
    m = ranks.program.shape.microbatches
    for step in range(first, end):
        numbers = torch.Generator().manual_seed(step)
        x, y = torch.randn(2, m, 5, 4, generator=numbers)
        ranks.step(x, y)


def save_and_read(
    ranks: InProcessExecutor, folder: Path, step: int, **options: Any
) -> dict[str, Tensor]:
    save(ranks, folder, step=step, **options)
    return read_checkpoint_tensors(folder, step)


def tensors_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


@pytest.mark.filterwarnings("ignore:.* is not split in itself")
@pytest.mark.filterwarnings("ignore:.* changes its buffer")
@settings(
    max_examples=6, deadline=None, phases=[Phase.generate], suppress_health_check=[*HealthCheck]
)
@given(
    data=st.data(), zeros=st.tuples(*[st.integers(0, 3)] * 2), name=st.sampled_from([*OPTIMIZERS])
)
def test_any_draft_loads_checkpoint_of_another_draft(data: Any, zeros: Any, name: str) -> None:
    draft = data.draw(compute_programs(2, 2))
    shape, (zero, second_zero) = draft.shape, zeros
    assume(shape.optimizer_steps == 1)
    writes = shape.placement_rows == 1  # replicas of a stage would have different buffers
    m, stages, optimizer = shape.microbatches, shape.stages, OPTIMIZERS[name]
    second_draft = data.draw(
        st.sampled_from(
            [(looped_bfs, PipelineShape(1, m, stages)), (gpipe, PipelineShape(stages, m))]
        )
    )

    def make(draft: Any, seed: int, zero: int) -> InProcessExecutor:
        modules = make_mixed_stages(stages, seed, writes=writes)
        return make_ranks_of_draft(draft, modules, optimizer, zero)

    with TemporaryDirectory() as temporary:
        folder, second_folder = Path(temporary) / "one", Path(temporary) / "other"
        first = make(draft, 0, zero)
        run_random_steps(first, 0, data.draw(st.integers(0, 2)))
        expected = save_and_read(first, folder, 2)
        second = make(draft_of(*second_draft), 1, second_zero)
        run_random_steps(second, 0, data.draw(st.integers(0, 1)))
        assert load(second, folder) == {"step": 2, "extra": {}}
        assert tensors_equal(save_and_read(second, second_folder, 2), expected)
        third = make(draft, 2, zero)
        load(third, second_folder)
        for ranks in (first, third):
            run_random_steps(ranks, 2, 3)
        assert tensors_equal(
            save_and_read(first, folder, 3), save_and_read(third, second_folder, 3)
        )


GPTS = [
    Layout(one_f_one_b, PipelineShape(1, 4)),
    Layout(one_f_one_b, PipelineShape(4, 4), zero=2),
    Layout(interleaved, PipelineShape(2, 4, 2), zero=3),
    Layout(schedir.schedules.zb_v, PipelineShape(2, 4, 2, placement="vee")),
    Layout(schedir.schedules.dualpipe, PipelineShape(2, 4, placement="mirror"), zero=1),
]


@pytest.mark.parametrize("tied", [False, True])
def test_tied_weight_is_saved_once(tied: bool, tmp_path: Path) -> None:
    model = Model(tied=tied, dropout=0.1)
    expected: dict[str, Tensor] = {}
    for k, layout in enumerate(cases(GPTS[::2], GPTS[1::2])):
        ranks = create_in_process_executor(layout, model)
        assert (load(ranks, tmp_path, name_map=keep_name) is None) == (not k)
        if not k:
            run_steps(ranks, 0, 1)
        save(ranks, tmp_path, step=k, name_map=keep_name)
        expected = expected or read_checkpoint_tensors(tmp_path, k)
        assert tensors_equal(read_checkpoint_tensors(tmp_path, k), expected)
        assert ("weights/head.weight" in expected) == (not tied)
    other = create_in_process_executor(GPTS[0], model._replace(tied=not tied))
    message = "one weight in it, but two weights here|no stage here has it"
    with pytest.raises(CheckpointError, match=message):
        load(other, tmp_path, name_map=keep_name)


def test_weights_load_into_another_dtype(tmp_path: Path) -> None:
    """16-bit weights are read from rounded float32 weights, and float32 from main parameters."""
    float32_model, bfloat16_model = Model(), Model(half=True)
    float32_ranks, half_ranks, loaded_ranks = (
        create_in_process_executor(GPTS[k], m)
        for k, m in ((0, float32_model), (2, bfloat16_model), (1, float32_model))
    )
    run_steps(float32_ranks, 0, 2)
    save(float32_ranks, tmp_path / "wide", step=2, name_map=keep_name)
    with pytest.warns(UserWarning, match="bfloat16 weights are read from weights of a "):
        load(half_ranks, tmp_path / "wide", name_map=keep_name)
    save(half_ranks, tmp_path / "half", step=2, name_map=keep_name)
    with pytest.warns(UserWarning, match="float32 weights are read from float32 copies"):
        load(loaded_ranks, tmp_path / "half", name_map=keep_name)
    save(loaded_ranks, tmp_path / "again", step=2, name_map=keep_name)
    expected, half_tensors, again = (
        read_checkpoint_tensors(tmp_path / name, 2) for name in ("wide", "half", "again")
    )
    assert tensors_equal(expected, again)
    for name in (n for n in half_tensors if n.startswith("weights/")):
        assert torch.equal(half_tensors[name], expected[name].bfloat16())
        assert torch.equal(half_tensors[name.replace("weights/", "main/")], expected[name])


class DropoutLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x))


def test_random_numbers_resume_after_load(tmp_path: Path) -> None:
    """Random numbers resume from the seed and the step, or from the saved generator states."""

    def make(seed: int | None, shape: PipelineShape = SHAPE) -> InProcessExecutor:
        stages = make_linear_stages(DropoutLinear, DropoutLinear)
        return make_ranks(stages, shape=shape, seed=seed)

    for seed in (3, None):
        saved = make(seed)
        run_random_steps(saved, 0, 2)
        save(saved, tmp_path, step=2)
        run_random_steps(saved, 2, 4)
        expected = save_and_read(saved, tmp_path, 4)
        resumed = make(seed)
        load(resumed, tmp_path, step=2)
        run_random_steps(resumed, 2, 4)
        assert tensors_equal(save_and_read(resumed, tmp_path / str(seed), 4), expected)
    with pytest.warns(UserWarning, match="random numbers depend on the number of processes"):
        load(make(None, ONE_RANK), tmp_path)
    with pytest.warns(UserWarning, match="seed of modules is 4; before, it was None"):
        load(make(4), tmp_path)


def test_loss_scale_and_extra_state_resume(tmp_path: Path) -> None:
    def make_scaled_ranks() -> InProcessExecutor:
        gradients = GradientOptions(loss_scale=LossScale(8.0, growth_interval=2))
        return make_ranks(make_mixed_stages(2, 0), gradients=gradients)

    saved, resumed = make_scaled_ranks(), make_scaled_ranks()
    run_random_steps(saved, 0, 3)
    save(saved, tmp_path, step=3, extra_state={"cursor": [1, 2], "text": "a"})
    assert load(resumed, tmp_path) == {"step": 3, "extra": {"cursor": [1, 2], "text": "a"}}
    for rank in (*saved.executors, *resumed.executors):
        scale = rank.state.options.gradients.loss_scale
        assert scale is not None and (float(scale.value), int(scale.good_steps)) == (16, 1)
        assert rank.random_streams.step == 3


class LossWithBuffer(nn.Module):
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, y: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return ((y - target) * self.weight.detach()).square().sum()


def test_weights_and_buffers_of_loss_resume(tmp_path: Path) -> None:
    saved_loss, loaded_loss = LossWithBuffer(), LossWithBuffer()
    with torch.no_grad():
        saved_loss.weight.mul_(3)
    ranks = make_ranks(make_mixed_stages(2, 0), loss=saved_loss)
    run_random_steps(ranks, 0, 1)
    save(ranks, tmp_path, step=1)
    load(make_ranks(make_mixed_stages(2, 1), shape=ONE_RANK, loss=loaded_loss), tmp_path)
    assert torch.equal(loaded_loss.weight, saved_loss.weight) and float(loaded_loss.calls) == 3


def test_save_validates_last_update(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "of": {"norm_check": "after_step"},
        "gradients": GradientOptions(max_norm=0.01),
        "loss": nn.MSELoss(reduction="sum"),
    }
    results = []
    for saves in (False, True):
        ranks = make_ranks(**options)
        run_random_steps(ranks, 0, 1)
        if saves:
            save(ranks, tmp_path, step=1)
        run_random_steps(ranks, 1, 2)
        ranks.validate_last_update()
        results.append(save_and_read(ranks, tmp_path / str(saves), 2))
    assert tensors_equal(*results)


def test_forward_only_program_loads_only_weights(tmp_path: Path) -> None:
    trained = make_ranks(make_mixed_stages(2, 0))
    run_random_steps(trained, 0, 2)
    expected = save_and_read(trained, tmp_path, 2)
    stages = make_mixed_stages(2, 1)
    evaluating = make_ranks(
        stages, None, ONE_RANK, schedir.schedules.forward_only, clip_grad_norm=False
    )
    load(evaluating, tmp_path)
    for s, stage in enumerate(stages):
        for name, value in stage.state_dict().items():
            if "again" not in name:
                kind = "weights" if name in dict(stage.named_parameters()) else "buffers"
                assert torch.equal(expected[f"{kind}/stages.{s}.{name}"], value)


class Own(torch.optim.SGD):
    pass


class Counts:
    def __init__(self, parameters: Any) -> None:
        self.inner, self.count = torch.optim.SGD(parameters, 0.1), 0

    def step(self) -> None:
        self.inner.step()


class SlashInStateName(torch.optim.SGD):
    """An optimizer with a slash in the name of a state."""

    elementwise = True

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["of/old"] = p.detach().clone()


class LinearWithExtraState(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"a": 1}

    def set_extra_state(self, state: Any) -> None: ...


class FailingLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("as told")


def _make_wider_stages() -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)), nn.Linear(4, 4)]


def _make_failed_ranks() -> InProcessExecutor:
    ranks = make_ranks(make_linear_stages(nn.Linear, FailingLinear))
    with pytest.raises(ExecutionError):
        run_random_steps(ranks, 0, 1)
    return ranks


def _enter_full_parameters(ranks: InProcessExecutor) -> InProcessExecutor:
    for rank in ranks.executors:
        rank.shows = rank.full_parameters()  # type: ignore[attr-defined]
        rank.shows.__enter__()  # type: ignore[attr-defined]
    return ranks


def make_trained_ranks(*arguments: Any, **options: Any) -> InProcessExecutor:
    ranks = make_ranks(*arguments, **options)
    run_random_steps(ranks, 0, 1)
    return ranks


NOT_SAVED: dict[str, Any] = {
    "an optimizer of one's own": lambda: make_trained_ranks(optimizer=partial(Own, lr=0.1)),
    "a count beside an optimizer": lambda: make_trained_ranks(optimizer=Counts),
    "Adafactor": lambda: make_trained_ranks(optimizer=lambda p: torch.optim.Adafactor(p)),
    "a state that is no tensor": lambda: make_trained_ranks(
        make_linear_stages(nn.Linear, LinearWithExtraState)
    ),
    "a state whose name would be two": lambda: make_trained_ranks(
        optimizer=partial(SlashInStateName, lr=0.1)
    ),
    "a step that failed": _make_failed_ranks,
    "shown whole": lambda: _enter_full_parameters(make_trained_ranks(zero=3)),
}
NOT_READ: dict[str, Any] = {
    "other names and shapes": lambda: make_trained_ranks(_make_wider_stages()),
    "another optimizer": lambda: make_trained_ranks(optimizer=partial(torch.optim.SGD, lr=0.1)),
    "more moments": lambda: make_trained_ranks(optimizer=OPTIMIZERS["amsgrad"]),
    "more buffers": lambda: make_trained_ranks(make_mixed_stages(2, 0)),
    "fewer stages": lambda: make_ranks(make_linear_stages()[:1], shape=PipelineShape(1, 3)),
    "more stages": lambda: make_ranks(
        make_linear_stages(*[nn.Linear] * 3), shape=PipelineShape(3, 3)
    ),
    "of another type": lambda: make_ranks(
        [m.double() for m in make_linear_stages()], boundary=Boundary((5, 4), torch.float64)
    ),
}


def copy_state(ranks: InProcessExecutor) -> list[Tensor]:
    tensors: list[Tensor] = []
    for rank in ranks.executors:
        for stage in rank.stages.values():
            tensors += [t.clone() for t in (*stage.module.parameters(), *stage.module.buffers())]
        optimizer_state: Any = getattr(rank.resources.optimizer, "state", {})
        tensors += [t.clone() for state in optimizer_state.values() for t in state.values()]
    return tensors


def test_refused_saves_and_loads_change_nothing(tmp_path: Path) -> None:
    texts = []
    for name, make in NOT_SAVED.items():
        ranks = make()
        with pytest.raises(CheckpointError) as error:
            save(ranks, tmp_path / name, step=1)
        assert not (tmp_path / name).exists()
        texts.append(f"{name}\n{error.value}\n")
    wrong_options: dict[str, dict[str, Any]] = {
        "one name for two": {"name_map": lambda s, n: n},
        "one name for two of a stage": {"name_map": lambda s, n: str(s)},
        "no name": {"name_map": lambda s, n: None},
        "names in a dict": {"name_map": {"weight": "weight"}},
        "names without stages": {"name_map": lambda name: name},
        "what JSON cannot say": {"extra_state": {"a": {1, 2}}},
        "no mapping": {"extra_state": [1]},
        "a tensor": {"extra_state": {"epoch": 1, "rng": torch.zeros(3)}},
        "a key that is no text": {"extra_state": {1: 2}},
        "a nested key": {"extra_state": {"a": {1: 2}}},
        "an infinite number": {"extra_state": {"lr": math.nan}},
        "half a checkpoint": {"keep": 1.5},
    }
    for name, options in wrong_options.items():
        with pytest.raises(CheckpointError) as error:
            save(make_trained_ranks(), tmp_path / name, **{"step": 1} | options)
        assert not [*(tmp_path / name).glob("step-*")]
        texts.append(f"{name}\n{error.value}\n")
    saved = make_trained_ranks()
    save(saved, tmp_path, step=np.int64(1))  # type: ignore[arg-type]
    assert load(saved, tmp_path, step=np.int64(1)) == {"step": 1, "extra": {}}  # type: ignore[arg-type]
    wrong_names: dict[str, Any] = {
        "names of another map": lambda s, n: f"layers.{s}.{n}",
        "a load with names in a dict": {"weight": "weight"},
    }
    for name, make in (NOT_READ | dict.fromkeys(wrong_names, make_trained_ranks)).items():
        ranks = make()
        before = copy_state(ranks)
        options = {"name_map": wrong_names[name]} if name in wrong_names else {}
        with pytest.raises(CheckpointError) as error:
            load(ranks, tmp_path, **options)
        assert all(torch.equal(a, b) for a, b in zip(before, copy_state(ranks), strict=True))
        texts.append(f"{name}\n{error.value}\n")
    assert "\n".join(texts) == GOLDEN.read_text()
