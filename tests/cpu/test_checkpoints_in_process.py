"""Checkpoints of virtual ranks in one process, with any stages, optimizers and dtypes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

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
from tests.cpu.checkpoint_layouts import Layout, Model, in_process, same, steps, whole

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


class Mixed(nn.Module):
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


def mixed(stages: int, seed: int, *, writes: bool = True) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [Mixed().train(writes) for _ in range(stages)]


def ranks_of(
    draft: Any, stages: list[nn.Module], optimizer: Any = ADAM, zero: int = 0, **how: Any
) -> InProcessExecutor:
    clip = how.pop("clip_grad_norm", True)
    program = schedir.compile(draft, zero=zero, clip_grad_norm=clip, **how.pop("of", {}))
    usual: dict[str, Any] = {"loss": nn.functional.mse_loss, "boundary": (5, 4)}
    return InProcessExecutor(program, stages, **usual | {"optimizer": optimizer} | how)


def plain(schedule: Any, shape: PipelineShape, *rest: Any, **how: Any) -> InProcessExecutor:
    return ranks_of(draft_of(schedule, shape), *rest, **how)


def go(ranks: InProcessExecutor, first: int, end: int) -> None:
    m = ranks.program.shape.microbatches
    for step in range(first, end):
        numbers = torch.Generator().manual_seed(step)
        x, y = torch.randn(2, m, 5, 4, generator=numbers)
        ranks.step(x, y)


def saved(ranks: InProcessExecutor, folder: Path, step: int, **how: Any) -> dict[str, Tensor]:
    save(ranks, folder, step=step, **how)
    return whole(folder, step)


def alike(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.filterwarnings("ignore:.* is not split in itself")
@pytest.mark.filterwarnings("ignore:.* changes its buffer")
@settings(
    max_examples=6, deadline=None, phases=[Phase.generate], suppress_health_check=[*HealthCheck]
)
@given(
    data=st.data(), zeros=st.tuples(*[st.integers(0, 3)] * 2), name=st.sampled_from([*OPTIMIZERS])
)
def test_any_draft_reads_what_any_other_wrote(data: Any, zeros: Any, name: str) -> None:
    draft = data.draw(compute_programs(3, 3))
    shape, (one, two) = draft.shape, zeros
    assume(shape.optimizer_steps == 1)
    writes = shape.placement_rows == 1  # replicas of a stage would have different buffers
    m, stages, optimizer = shape.microbatches, shape.stages, OPTIMIZERS[name]
    other = data.draw(
        st.sampled_from(
            [
                draft_of(looped_bfs, PipelineShape(1, m, stages)),
                draft_of(gpipe, PipelineShape(stages, m)),
            ]
        )
    )
    with TemporaryDirectory() as at:
        folder, again = Path(at) / "one", Path(at) / "other"
        first = ranks_of(draft, mixed(stages, 0, writes=writes), optimizer, one)
        go(first, 0, data.draw(st.integers(0, 2)))
        right = saved(first, folder, 2)
        second = ranks_of(other, mixed(stages, 1, writes=writes), optimizer, two)
        go(second, 0, data.draw(st.integers(0, 1)))
        assert load(second, folder) == {"step": 2, "extra": {}}
        assert alike(saved(second, again, 2), right)
        third = ranks_of(draft, mixed(stages, 2, writes=writes), optimizer, one)
        load(third, again)
        for ranks in (first, third):
            go(ranks, 2, 4)
        assert alike(saved(first, folder, 4), saved(third, again, 4))


GPTS = [
    Layout(one_f_one_b, PipelineShape(1, 4)),
    Layout(one_f_one_b, PipelineShape(4, 4), zero=2),
    Layout(interleaved, PipelineShape(2, 4, 2), zero=3),
    Layout(schedir.schedules.zb_v, PipelineShape(2, 4, 2, placement="vee")),
    Layout(schedir.schedules.dualpipe, PipelineShape(2, 4, placement="mirror"), zero=1),
]


@pytest.mark.parametrize("tied", [False, True])
def test_a_weight_that_stages_share_is_there_once(tied: bool, tmp_path: Path) -> None:
    model = Model(tied=tied, dropout=0.1)
    right: dict[str, Tensor] = {}
    for k, layout in enumerate(GPTS):
        ranks = in_process(layout, model)
        assert (load(ranks, tmp_path, name_map=same) is None) == (not k)
        if not k:
            steps(ranks, 0, 2)
        save(ranks, tmp_path, step=k, name_map=same)
        right = right or whole(tmp_path, k)
        assert alike(whole(tmp_path, k), right)
        assert ("weights/head.weight" in right) == (not tied)
    with pytest.raises(
        CheckpointError, match=r"one weight in it, but two weights here|no stage here has it"
    ):
        load(in_process(GPTS[0], model._replace(tied=not tied)), tmp_path, name_map=same)


def test_types_of_weights_may_be_others(tmp_path: Path) -> None:
    """16-bit weights are read from rounded float32 weights, and float32 from main parameters."""
    wide, half = Model(), Model(half=True)
    one, two, three = (in_process(GPTS[k], m) for k, m in ((0, wide), (2, half), (1, wide)))
    steps(one, 0, 2)
    save(one, tmp_path / "wide", step=2, name_map=same)
    with pytest.warns(UserWarning, match="bfloat16 weights are read from weights of a "):
        load(two, tmp_path / "wide", name_map=same)
    save(two, tmp_path / "half", step=2, name_map=same)
    with pytest.warns(UserWarning, match="float32 weights are read from float32 copies"):
        load(three, tmp_path / "half", name_map=same)
    save(three, tmp_path / "again", step=2, name_map=same)
    right, found = whole(tmp_path / "wide", 2), whole(tmp_path / "half", 2)
    assert alike(right, whole(tmp_path / "again", 2))
    for name in (n for n in found if n.startswith("weights/")):
        assert torch.equal(found[name], right[name].bfloat16())
        assert torch.equal(found[name.replace("weights/", "main/")], right[name])


class Drops(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x))


def test_draws_go_on(tmp_path: Path) -> None:
    """After a load, random numbers continue: from the seed and step, or from torch's generators."""
    for seed in (3, None):

        def made() -> InProcessExecutor:
            return plain(one_f_one_b, PipelineShape(2, 3), [Drops(4, 4), Drops(4, 4)], seed=seed)  # noqa: B023

        one = made()
        go(one, 0, 2)
        save(one, tmp_path, step=2)
        go(one, 2, 4)
        right = saved(one, tmp_path, 4)
        two = made()
        load(two, tmp_path, step=2)
        go(two, 2, 4)
        assert alike(saved(two, tmp_path / str(seed), 4), right)
    with pytest.warns(UserWarning, match="random numbers depend on the number of processes"):
        load(
            plain(looped_bfs, PipelineShape(1, 3, 2), [Drops(4, 4), Drops(4, 4)], seed=None),
            tmp_path,
        )
    with pytest.warns(UserWarning, match="seed of modules is 4; before, it was None"):
        load(plain(one_f_one_b, PipelineShape(2, 3), [Drops(4, 4), Drops(4, 4)], seed=4), tmp_path)


def test_a_scale_and_what_is_extra_go_on(tmp_path: Path) -> None:
    def made() -> InProcessExecutor:
        scale = LossScale(8.0, growth_interval=2)
        return plain(
            one_f_one_b,
            PipelineShape(2, 3),
            mixed(2, 0),
            gradients=GradientOptions(loss_scale=scale),
        )

    one, two = made(), made()
    go(one, 0, 3)
    save(one, tmp_path, step=3, extra_state={"cursor": [1, 2], "text": "a"})
    assert load(two, tmp_path) == {"step": 3, "extra": {"cursor": [1, 2], "text": "a"}}
    for rank, other in zip(one.executors, two.executors, strict=True):
        scale, found = (
            rank.state.options.gradients.loss_scale,
            other.state.options.gradients.loss_scale,
        )
        assert scale is not None and found is not None
        assert float(scale.value) == float(found.value) == 16 and int(found.good_steps) == 1
        assert rank.random_streams.step == other.random_streams.step == 3


class Weighs(nn.Module):
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, y: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return ((y - target) * self.weight.detach()).square().sum()


def test_a_loss_with_numbers_of_its_own(tmp_path: Path) -> None:
    one, two = Weighs(), Weighs()
    with torch.no_grad():
        one.weight.mul_(3)
    ranks = plain(one_f_one_b, PipelineShape(2, 3), mixed(2, 0), loss=one)
    go(ranks, 0, 1)
    save(ranks, tmp_path, step=1)
    load(plain(looped_bfs, PipelineShape(1, 3, 2), mixed(2, 1), loss=two), tmp_path)
    assert torch.equal(two.weight, one.weight) and float(two.calls) == 3


def test_an_update_that_is_not_validated_is_settled(tmp_path: Path) -> None:
    options = {
        "of": {"norm_check": "after_step"},
        "gradients": GradientOptions(max_norm=0.01),
        "loss": nn.MSELoss(reduction="sum"),
    }
    found = []
    for saves in (False, True):
        ranks = plain(
            one_f_one_b, PipelineShape(2, 3), [nn.Linear(4, 4), nn.Linear(4, 4)], **options
        )
        with torch.no_grad():
            for rank in ranks.executors:
                for stage in rank.stages.values():
                    for p in stage.module.parameters():
                        p.fill_(0.5)
        go(ranks, 0, 1)
        if saves:
            save(ranks, tmp_path, step=1)
        go(ranks, 1, 2)
        ranks.validate_last_update()
        found.append(saved(ranks, tmp_path / str(saves), 2))
    assert alike(*found)


def test_weights_alone_are_read_where_nothing_is_trained(tmp_path: Path) -> None:
    one = plain(one_f_one_b, PipelineShape(2, 3), mixed(2, 0))
    go(one, 0, 2)
    right = saved(one, tmp_path, 2)
    stages = mixed(2, 1)
    two = plain(
        schedir.schedules.forward_only, PipelineShape(1, 4, 2), stages, None, clip_grad_norm=False
    )
    load(two, tmp_path)
    for s, stage in enumerate(stages):
        for name, value in stage.state_dict().items():
            if "again" not in name:
                kind = "weights" if name in dict(stage.named_parameters()) else "buffers"
                assert torch.equal(right[f"{kind}/stages.{s}.{name}"], value)


# ------------------------------------------------------------ refusals


class Own(torch.optim.SGD):
    pass


class Counts:
    def __init__(self, parameters: Any) -> None:
        self.inner, self.count = torch.optim.SGD(parameters, 0.1), 0

    def step(self) -> None:
        self.inner.step()


class Slashed(torch.optim.SGD):
    """An optimizer with a slash in the name of a state."""

    elementwise = True

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["of/old"] = p.detach().clone()


class Extra(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"a": 1}

    def set_extra_state(self, state: Any) -> None: ...


class Fails(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("as told")


def linears(*kinds: Any) -> list[nn.Module]:
    torch.manual_seed(0)
    return [kind(4, 4) for kind in kinds or (nn.Linear, nn.Linear)]


def _wider() -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)), nn.Linear(4, 4)]


def _failed() -> InProcessExecutor:
    ranks = plain(one_f_one_b, PipelineShape(2, 3), linears(nn.Linear, Fails))
    with pytest.raises(ExecutionError):
        go(ranks, 0, 1)
    return ranks


def _whole(ranks: InProcessExecutor) -> InProcessExecutor:
    for rank in ranks.executors:
        rank.shows = rank.full_parameters()  # type: ignore[attr-defined]
        rank.shows.__enter__()  # type: ignore[attr-defined]
    return ranks


def two(
    stages: list[nn.Module] | None = None, optimizer: Any = ADAM, **how: Any
) -> InProcessExecutor:
    ranks = plain(
        one_f_one_b, PipelineShape(2, 3), linears() if stages is None else stages, optimizer, **how
    )
    go(ranks, 0, 1)
    return ranks


NOT_SAVED: dict[str, Any] = {
    "an optimizer of one's own": lambda: two(optimizer=partial(Own, lr=0.1)),
    "a count beside an optimizer": lambda: two(optimizer=Counts),
    "Adafactor": lambda: two(optimizer=lambda p: torch.optim.Adafactor(p)),
    "a state that is no tensor": lambda: two(linears(nn.Linear, Extra)),
    "a state whose name would be two": lambda: two(optimizer=partial(Slashed, lr=0.1)),
    "a step that failed": _failed,
    "shown whole": lambda: _whole(two(zero=3)),
}
NOT_READ: dict[str, Any] = {
    "other names and shapes": lambda: two(_wider()),
    "another optimizer": lambda: two(optimizer=partial(torch.optim.SGD, lr=0.1)),
    "more moments": lambda: two(optimizer=OPTIMIZERS["amsgrad"]),
    "more buffers": lambda: two(mixed(2, 0)),
    "fewer stages": lambda: plain(one_f_one_b, PipelineShape(1, 3), linears()[:1]),
    "of another type": lambda: plain(one_f_one_b, PipelineShape(2, 3),
                                     [m.double() for m in linears()],
                                     boundary=Boundary((5, 4), torch.float64)),
}  # fmt: skip


def state_of(ranks: InProcessExecutor) -> list[Tensor]:
    found: list[Tensor] = []
    for rank in ranks.executors:
        for stage in rank.stages.values():
            found += [t.clone() for t in (*stage.module.parameters(), *stage.module.buffers())]
        kept: Any = getattr(rank.resources.optimizer, "state", {})
        found += [t.clone() for state in kept.values() for t in state.values()]
    return found


def test_what_cannot_be_right_is_refused(tmp_path: Path) -> None:
    texts = []
    for name, make in NOT_SAVED.items():
        ranks = make()
        with pytest.raises(CheckpointError) as error:
            save(ranks, tmp_path / name, step=1)
        assert not (tmp_path / name).exists()
        texts.append(f"{name}\n{error.value}\n")
    wrong: dict[str, dict[str, Any]] = {
        "one name for two": {"name_map": lambda s, n: n},
        "one name for two of a stage": {"name_map": lambda s, n: str(s)},
        "no name": {"name_map": lambda s, n: None},
        "what JSON cannot say": {"extra_state": {"a": {1, 2}}},
        "no mapping": {"extra_state": [1]},
    }
    for name, how in wrong.items():
        with pytest.raises(CheckpointError) as error:
            save(two(), tmp_path / name, step=1, **how)
        assert not [*(tmp_path / name).glob("step-*")]
        texts.append(f"{name}\n{error.value}\n")
    save(two(), tmp_path, step=1)
    for name, make in NOT_READ.items():
        ranks = make()
        before = state_of(ranks)
        with pytest.raises(CheckpointError) as error:
            load(ranks, tmp_path)
        assert all(torch.equal(a, b) for a, b in zip(before, state_of(ranks), strict=True))
        texts.append(f"{name}\n{error.value}\n")
    assert "\n".join(texts) == GOLDEN.read_text()
