"""Numbers that are not finite: no weight takes them on, and a run stops and says where it began."""

from __future__ import annotations

import csv
import math
import re
import sys
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedir.data
from schedir import compile, gpt
from schedir.config import TrainConfig
from schedir.errors import UsageError
from schedir.plan import Plan
from schedir.program import Program
from schedir.runtime.inprocess import InProcess
from schedir.runtime.precision import LossScale, MainOptimizer, float32_gradients
from schedir.runtime.rank import Boundary
from schedir.schedules import one_f_one_b, pipedream_2bw
from schedir.train import run
from tests.gloo.tiny_stages import BOUNDARY, batch, gpt_stages, zb
from tests.gloo.training import arguments, finish, start

GOLDEN = Path(__file__).parents[1] / "golden"

# ------------------------------------------------------------ what an executor does


def sgd(**options: Any) -> Callable[[Any], Any]:
    return partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5, **options)


def adamw(**options: Any) -> Callable[[Any], Any]:
    return partial(torch.optim.AdamW, lr=0.1, **options)


class Stranger:
    """An optimizer that knows nothing but to step."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters

    def step(self) -> None:
        with torch.no_grad():
            for p in self.parameters:
                assert p.grad is not None
                p.sub_(p.grad, alpha=0.1)


class Averaged(torch.optim.AdamW):
    """An optimizer that does more than torch's own: it averages the weights."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.1, fused=True)
        self.averages = [p.detach().clone() for p in parameters]

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for average, p in zip(self.averages, self.param_groups[0]["params"], strict=True):
            average.lerp_(p.detach(), 0.5)


class Around:
    """An optimizer around another one, as schedule-free ones are."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.inner = torch.optim.AdamW(parameters, lr=0.1, fused=True)
        self.averages = [torch.zeros(())]

    def step(self) -> None:
        self.inner.step()
        self.averages[0] += 1


def hooked(parameters: list[nn.Parameter]) -> Any:
    """An optimizer with a hook on its step."""
    optimizer: Any = torch.optim.AdamW(parameters, lr=0.1, fused=True)
    optimizer.averages = [torch.zeros(())]
    optimizer.register_step_post_hook(lambda *_: optimizer.averages[0].add_(1))
    return optimizer


def spoilt(stage: nn.Module) -> nn.Module:
    """A stage whose output, or its gradient, is multiplied by what it is told."""
    told: Any = stage
    told.output = told.gradient = 1.0

    def spoil(module: nn.Module, given: Any, y: Tensor) -> Tensor:
        y = y * told.output
        if told.gradient != 1.0:
            y.register_hook(lambda dy: dy * told.gradient)
        return y

    stage.register_forward_hook(spoil)
    return stage


def world_of(program: Program, make: Any, dtype: torch.dtype = torch.float32) -> Any:
    stages = [spoilt(stage.to(dtype)) for stage in gpt_stages(program.plan.stages, tied=False)]
    wide = dtype != torch.float32
    for stage in stages if wide else ():
        float32_gradients(stage)
    return InProcess(
        program,
        stages,
        loss=gpt.loss,
        boundary=Boundary(BOUNDARY.shape, dtype),
        optimizer=(lambda ps: MainOptimizer(ps, make)) if wide else make,
    )


def learned(world: Any) -> list[Tensor]:
    """Weights, and then the state of optimizers, cloned."""
    weights = [
        p for rank in world.ranks for s in rank.stages.values() for p in s.module.parameters()
    ]
    weights += [p for rank in world.ranks for p in getattr(rank.optimizer, "main", [])]
    weights += [a for rank in world.ranks for a in getattr(rank.optimizer, "averages", [])]
    optimizers = [getattr(rank.optimizer, "inner", rank.optimizer) for rank in world.ranks]
    states = [each for one in optimizers for each in getattr(one, "state", {}).values()]
    state = [t for each in states for t in each.values() if isinstance(t, Tensor)]
    return [t.detach().clone() for t in (*weights, *state)]


def set_stage(world: Any, stage: int, output: float = 1.0, gradient: float = 1.0) -> None:
    for rank in world.ranks:
        if stage in rank.stages:
            rank.stages[stage].module.output = output
            rank.stages[stage].module.gradient = gradient


SPOILS = [
    {"stage": 0, "output": math.nan},
    {"stage": 1, "output": math.inf},
    {"stage": 2, "output": math.nan},
    {"stage": 2, "gradient": math.nan},  # of all; the loss is fine
    {"stage": 0, "gradient": math.inf},  # of the first stage alone
]


@pytest.mark.parametrize("spoil", SPOILS, ids=str)
@pytest.mark.parametrize("schedule", [one_f_one_b, zb])
@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (adamw(), torch.float32),
        (adamw(fused=True), torch.float32),
        (sgd(), torch.float32),
        (sgd(fused=True), torch.float32),
        (Stranger, torch.float32),
        (Averaged, torch.float32),
        (Around, torch.float32),
        (hooked, torch.float32),
        (adamw(), torch.bfloat16),
        (adamw(fused=True), torch.bfloat16),
    ],
)
def test_what_is_not_finite_is_as_if_it_had_not_been(
    make: Any, dtype: torch.dtype, schedule: Any, spoil: dict[str, Any]
) -> None:
    """Before anything was learned, when no optimizer has a state, and after."""
    program = compile(schedule, Plan(3, 4), clip=True)
    ours, plain = world_of(program, make, dtype), world_of(program, make, dtype)
    for step in range(2):
        before = learned(ours)
        set_stage(ours, **spoil)
        ours.step(*batch(4, seed=7))
        assert [rank.finite.tolist() for rank in ours.ranks] == [[False]] * 3
        after = learned(ours)
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=False))
        set_stage(ours, spoil["stage"])
        for world in (ours, plain):
            world.step(*batch(4, seed=step))
            assert [rank.finite.tolist() for rank in world.ranks] == [[True]] * 3
        pairs = zip(learned(ours), learned(plain), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    assert not all(torch.equal(a, b) for a, b in zip(before, learned(ours), strict=False))


def test_a_loss_alone_counts_though_its_gradients_are_finite() -> None:
    """As of a token that a mask forbids: the loss is infinite, and its gradient is not."""
    program = compile(one_f_one_b, Plan(2, 4), clip=True)

    def loss(y: Tensor, target: Tensor) -> Tensor:
        return gpt.loss(y, target) + (math.inf if target.sum() == 0 else 0.0)

    stages = gpt_stages(2, tied=False)
    world = InProcess(program, stages, loss=loss, boundary=BOUNDARY, optimizer=adamw())
    inputs, targets, scale = batch(4)
    targets[1] = 0
    before = deepcopy([*stages[0].parameters()])
    world.step(inputs, targets, scale)
    assert [rank.finite.tolist() for rank in world.ranks] == [[False]] * 2
    assert all(torch.equal(a, b) for a, b in zip(before, stages[0].parameters(), strict=True))


@pytest.mark.parametrize("schedule", [one_f_one_b, zb])
def test_a_loss_counts_though_no_gradient_tells(schedule: Any) -> None:
    """As a mean over no tokens: torch gives a loss that is NaN, and gradients of zero."""
    program = compile(schedule, Plan(3, 4), clip=True)
    stages = gpt_stages(3, tied=False)

    def mean(y: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(y.flatten(0, -2), target.flatten(), ignore_index=-1)

    world = InProcess(program, stages, loss=mean, boundary=BOUNDARY, optimizer=adamw())
    inputs, targets, scale = batch(4)
    before = learned(world)
    targets[2] = -1
    assert world.step(inputs, targets, scale).isnan()
    assert [rank.finite.tolist() for rank in world.ranks] == [[False]] * 3
    after = learned(world)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=False))


class Rotates(nn.Module):
    """A complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(5, 5, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.w.dtype) @ self.w).imag


def test_the_norm_of_complex_gradients_is_that_of_both_parts() -> None:
    torch.manual_seed(0)
    stages, x = [Rotates(), Rotates()], torch.randn(4, 3, 5)
    world = InProcess(
        compile(one_f_one_b, Plan(2, 4), clip=True), stages,
        loss=lambda y, t: y.square().sum(), boundary=(3, 5), max_norm=math.inf,
    )  # fmt: skip
    world.step(x, x)
    grads = [p.grad for stage in stages for p in stage.parameters() if p.grad is not None]
    whole = torch.stack([g.abs().double().square().sum() for g in grads]).sum().sqrt()
    assert float(world.ranks[0].norm) == pytest.approx(float(whole), rel=1e-6)


@pytest.mark.parametrize("clip", [False, True])
def test_without_the_norm_each_rank_judges_by_its_own_gradients(clip: bool) -> None:
    world = world_of(compile(one_f_one_b, Plan(3, 4), clip=clip), adamw())
    set_stage(world, 1, gradient=math.inf)
    world.step(*batch(4))
    finite = [bool(rank.finite) for rank in world.ranks]
    assert finite == [False, False, not clip]
    left = [all(p.isfinite().all() for p in r.stages[k].module.parameters())
            for k, r in enumerate(world.ranks)]  # fmt: skip
    assert all(left)


def test_gradients_that_are_not_finite_are_left_to_look_at() -> None:
    world = world_of(compile(one_f_one_b, Plan(2, 2), clip=True), adamw())
    set_stage(world, 0, gradient=math.inf)
    world.step(*batch(2))
    assert not all(g.isfinite().all() for g in world.ranks[0].stages[0].gradients.flat)
    assert all(g.isfinite().all() for g in world.ranks[1].stages[1].gradients.flat)


def test_each_update_of_a_step_has_its_own_word() -> None:
    program = compile(pipedream_2bw, Plan(2, 6, updates=3, delay=1), clip=True)
    ours, plain = world_of(program, adamw()), world_of(program, adamw())
    inputs, targets, scale = batch(6)
    last = ours.ranks[1].stages[1].module

    seen: list[int] = []
    last.register_forward_pre_hook(lambda *_: seen.append(1))
    last.register_forward_hook(lambda m, g, y: y * (math.nan if len(seen) in (3, 4) else 1.0))
    for world in (ours, plain):
        world.step(inputs, targets, scale)
    assert [rank.finite.tolist() for rank in ours.ranks] == [[True, False, True]] * 2
    assert all(t.isfinite().all() for t in learned(ours))
    pairs = zip(learned(ours), learned(plain), strict=True)
    assert not all(torch.equal(a, b) for a, b in pairs)


# ------------------------------------------------------------ what a run does


POISON = """\
import math
import os

import torch

import schedir.data
from schedir import gpt
from schedir.schedules import {schedule} as mine

made, drawn, now = gpt.build_stage, schedir.data.Batches.batch, [0]


def batch(self, step):
    now[0] = step
    return drawn(self, step)


def build_stage(config, s, stages, **more):
    def spoil(module, given, y):
        if now[0] in {steps} and s == {stage} and os.environ.get("RANK", "0") in {ranks}:
            {what}
        return y

    module = made(config, s, stages, **more)
    module.register_forward_hook(spoil)
    return module


schedir.data.Batches.batch = batch
gpt.build_stage = build_stage
"""
FORWARD, BACKWARD = "y = y * math.nan", "y.register_hook(lambda dy: dy * math.inf)"
ONE = ["pipeline.ranks=1", "pipeline.tp=1", "pipeline.stages_per_rank=4", "train.log_every=2"]


@pytest.fixture
def poison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Write a schedule whose file spoils a stage in some steps; what it patches is put back."""
    monkeypatch.setattr(gpt, "build_stage", gpt.build_stage)
    monkeypatch.setattr(schedir.data.Batches, "batch", schedir.data.Batches.batch)

    def write(
        what: str, stage: int, *steps: int, ranks: str = "01234567", schedule: str = "interleaved"
    ) -> str:
        path = tmp_path / f"poison{len([*tmp_path.iterdir()])}.py"
        path.write_text(
            POISON.format(what=what, stage=stage, steps=steps, ranks=[*ranks], schedule=schedule)
        )
        return f"pipeline.schedule={path}:mine"

    return write


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "loss.csv").open() as file:
        return [*csv.DictReader(file)]


@pytest.mark.parametrize("more", [[], ["train.precision=bfloat16"], ["train.precision=float16"]])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_run_stops_at_the_first_stage_of_a_loss(
    config: str,
    tmp_path: Path,
    poison: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
    stage: int,
    more: list[str],
) -> None:
    sets = [*ONE, *more, poison(FORWARD, stage, 3), f'output.folder="{tmp_path}"']
    assert run(config, sets) == 1
    golden = (GOLDEN / "not_finite.txt").read_text().splitlines()
    err = capsys.readouterr().err.splitlines()
    assert [re.sub(r" #\d+ +F \d\.0", " #9  F 2.0", line) for line in err] == golden
    assert err[1].split()[3:5] == ["F", f"{stage}.0"]
    assert [row["step"] for row in rows(tmp_path)] == ["1", "2", "3"]
    assert all(math.isfinite(float(row["loss"])) for row in rows(tmp_path))
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.parametrize("clip", ["1.0", "0"])
@pytest.mark.parametrize(
    ("stage", "sets"),
    [
        (1, ONE),
        (2, [*ONE, "train.precision=bfloat16"]),
        (1, [*ONE, "pipeline.stages_per_rank=1", "pipeline.placement=[0,0,0,0]",
             "pipeline.updates=3", "pipeline.delay=1"]),
    ],
)  # fmt: skip
def test_a_run_stops_at_the_stage_where_gradients_went_wrong(
    config: str,
    tmp_path: Path,
    poison: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
    stage: int,
    sets: list[str],
    clip: str,
) -> None:
    folder = f'output.folder="{tmp_path}"'
    assert run(config, [*sets, f"train.clip={clip}", poison(BACKWARD, stage, 0), folder]) == 1
    err = capsys.readouterr().err.splitlines()
    assert err[0].startswith("interleaved: a gradient of step 1 is infinite or NaN")
    assert err[1].split()[3:5] == ["B", f"{stage}.0"]
    assert ("own gradients" in err[0]) == (clip == "0")
    assert rows(tmp_path) == []


def test_the_same_random_numbers_are_drawn_to_find_where_it_began(
    config: str, tmp_path: Path, poison: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    rare = "y = y / (torch.rand(()) > 0.01)"
    sets = [*ONE, "train.steps=400", poison(rare, 1, *range(400)), f'output.folder="{tmp_path}"']
    assert run(config, sets) == 1
    assert capsys.readouterr().err.splitlines()[1].split()[4].startswith("1.")


def test_skipping_goes_on_and_is_counted(
    config: str, tmp_path: Path, poison: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    skip = "train.nonfinite=skip"
    sets = [*ONE, skip, poison(FORWARD, 1, 1, 2), f'output.folder="{tmp_path}"']
    assert run(config, sets) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert [line.partition("skipped ")[2][:1] for line in said] == ["1", "1", "0"]
    assert [row["skipped"] for row in rows(tmp_path)] == ["0", "1", "1", "0", "0", "0"]
    finite = [math.isfinite(float(row["loss"])) for row in rows(tmp_path)]
    assert finite == [True, False, False, True, True, True]


def test_what_a_loss_scale_makes_too_large_stops_no_run(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its first steps are always too large, and skipped; loss.csv says so."""
    folder = f'output.folder="{tmp_path}"'
    many = ["data.microbatch_size=8", "train.steps=8"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("schedir.trainer.LossScale", partial(LossScale, 2.0**22))
        assert run(config, [*ONE, *many, "train.precision=float16", folder]) == 0
    skipped = [row["skipped"] for row in rows(tmp_path)]
    assert skipped[0] == "1" and skipped[-1] == "0" and "skipped" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("what", "stage", "ranks", "sets", "where"),
    [
        # Of two replicas, the second.
        (FORWARD, 2, "4567", ["pipeline.dp=2"], ("rank 4: ", "rank 0", "F 2.0", "replica 1")),
        # Where nobody takes the norm, and all other ranks have sound gradients.
        (BACKWARD, 0, "0", ["pipeline.tp=1", "pipeline.ranks=3", "model.layers=6", "train.clip=0",
                            "train.timeout=10"],
         ("rank 0: ", "rank 0", "B 0.0", "")),
        # One tensor-parallel rank, whose sums go to both.
        (BACKWARD, 3, "3", ["train.transport=gloo"], ("rank ", "rank 1", "B 3.0", "")),
    ],
)  # fmt: skip
def test_all_processes_stop_with_one_message(
    config: str,
    tmp_path: Path,
    poison: Callable[..., str],
    what: str,
    stage: int,
    ranks: str,
    sets: list[str],
    where: tuple[str, str, str, str],
) -> None:
    sets = [*sets, "train.log_every=2", poison(what, stage, 3, ranks=ranks)]
    command = [sys.executable, "-m", "schedir", *arguments(config, tmp_path / "out", *sets)]
    code, _, err = finish(start(command))
    process, rank, instr, replica = where
    assert code == 1 and err.startswith(process) and err.count("of step 4 is infinite") == 1
    site = err.splitlines()[1]
    assert site.strip().startswith(rank) and instr in site and site.endswith(replica)
    assert [row["step"] for row in rows(tmp_path / "out")] == ["1", "2", "3"]


def test_skipping_needs_the_norm() -> None:
    with pytest.raises(UsageError, match="clip 0 takes none"):
        TrainConfig(nonfinite="skip", clip=0.0)
    with pytest.raises(UsageError, match="nonfinite 'go' is not known"):
        TrainConfig(nonfinite="go")
