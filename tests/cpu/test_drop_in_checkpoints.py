"""Tests of checkpoints of `schedir.torch_pipelining.Schedule`.

Any layout of torch's stages can load the checkpoint of another layout and continue the run. So can
an executor.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import schedir
from schedir import PipelineShape, TiedWeights
from schedir.checkpoints import load, save
from schedir.runtime.in_process import InProcessExecutor
from schedir.torch_pipelining import Schedule
from tests.cases import cases
from tests.cpu.checkpoint_layouts import keep_name, read_checkpoint_tensors
from tests.cpu.gloo_processes import run
from tests.cpu.test_checkpoint_resharding import compute_differences
from tests.cpu.torch_pipelines import WIDTH, make_stage

LAYERS, MB, ROWS = 4, 4, 16
TIED = "layers.0.linear.weight"
ADAM = partial(torch.optim.AdamW, lr=1e-2)


class Layer(nn.Module):
    """A layer of the model, with the same initial weights in every layout."""

    def __init__(self, number: int, drops: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        first = nn.Linear(WIDTH, WIDTH)
        torch.manual_seed(number)
        self.linear = nn.Linear(WIDTH, WIDTH)
        if number == LAYERS - 1:  # the first and the last layer have one weight
            self.linear.weight = first.weight
        self.scale = nn.Parameter(torch.randn(WIDTH), requires_grad=number != 1)
        self.noise = nn.Dropout(drops)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.noise(torch.tanh(self.linear(x)) * self.scale)
        return out


class NamedStage(nn.Module):
    """A stage whose layers have the same names as in the whole model."""

    def __init__(self, stage: int, stages: int, drops: float = 0.0) -> None:
        super().__init__()
        layers_per_stage = LAYERS // stages
        numbers = range(stage * layers_per_stage, (stage + 1) * layers_per_stage)
        self.layers = nn.ModuleDict({str(k): Layer(k, drops) for k in numbers})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def make_tied_weights(stages: int) -> TiedWeights:
    return TiedWeights((((0, TIED), (stages - 1, f"layers.{LAYERS - 1}.linear.weight")),))


def tie(parts: dict[int, nn.Module], stages: int) -> dict[int, nn.Module]:
    """Make the first and the last stage of a process use one Parameter."""
    if {0, stages - 1} <= parts.keys():
        first_layer, last_stage = parts[0].get_submodule("layers.0.linear"), parts[stages - 1]
        last_stage.get_submodule(f"layers.{LAYERS - 1}.linear").weight = first_layer.weight
    return parts


class Layout(NamedTuple):
    """A placement of stages and replicas, and the schedule."""

    schedule: str
    stages: int = 2
    dp: int = 1
    placement: str = "loop"
    runtime: str = "torch"
    ddp: bool = False
    copies: bool = False  # copies of the tied weight, even where a process has both
    drops: float = 0.0


class Run:
    """One rank of a training, written like the script of a user of torch's pipelining."""

    def __init__(self, layout: Layout) -> None:
        self.layout, world = layout, dist.get_world_size()
        sizes = (world // layout.dp, layout.dp)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp"))
        self.dp, pp = mesh["dp"].get_group(), mesh["pp"].get_group()
        n = layout.stages
        shape = PipelineShape(sizes[0], MB, n // sizes[0], layout.placement)
        local_stages = shape.stages_on_rank[dist.get_rank(pp)]
        parts: dict[int, nn.Module] = {s: NamedStage(s, n, layout.drops) for s in local_stages}
        parts = parts if layout.copies else tie(parts, n)
        self.parts = parts
        self.parameters = [*dict.fromkeys(p for m in parts.values() for p in m.parameters())]
        wrap: Any = partial(DistributedDataParallel, process_group=self.dp) if layout.ddp else None
        pipeline_stages = [make_stage(wrap(m) if wrap else m, s, n, pp) for s, m in parts.items()]
        options: dict[str, Any] = {"schedule": layout.schedule, "runtime": layout.runtime}
        self.schedule = Schedule(
            pipeline_stages, MB, mse_loss, tied_weights=make_tied_weights(n), **options
        )
        self.optimizer = ADAM([p for p in self.parameters if p.requires_grad])

    def steps(self, first: int, end: int) -> None:
        for step in range(first, end):
            torch_state = torch.get_rng_state()
            torch.manual_seed(1000 + step)
            batch = torch.randn(2, ROWS, WIDTH)
            torch.set_rng_state(torch_state)
            x, y = batch.chunk(self.layout.dp, 1)[dist.get_rank(self.dp)]
            n = self.layout.stages
            self.optimizer.zero_grad()
            self.schedule.step(*[x] * (0 in self.parts), target=y if n - 1 in self.parts else None)
            if self.layout.dp > 1 and not self.layout.ddp:  # the user reduces
                for p in self.parameters:
                    if p.grad is not None:
                        dist.all_reduce(p.grad.div_(self.layout.dp), group=self.dp)
            self.optimizer.step()
            for part in self.parts.values():
                for name, buffer in part.named_buffers():
                    assert name.endswith("steps")
                    buffer.add_(1)

    def save(self, folder: Path, step: int) -> None:
        save(self.schedule, folder, step=step, optimizer=self.optimizer, name_map=keep_name)

    def load(self, folder: Path) -> None:
        state = load(self.schedule, folder, step=2, optimizer=self.optimizer, name_map=keep_name)
        assert state == {"step": 2, "extra": {}}


def run_base(layout: Layout, folder: Path) -> None:
    """Run four steps, and save after steps 2, 3 and 4."""
    training = Run(layout)
    training.steps(0, 2)
    training.save(folder, 2)
    _run_two_more_steps(training, folder)


def _run_two_more_steps(training: Run, folder: Path) -> None:
    for step in (3, 4):
        training.steps(step - 1, step)
        training.save(folder, step)


def run_resumed(layout: Layout, folder: Path, name: str) -> None:
    """Load step 2, save it again, and continue to step 4."""
    training = Run(layout)
    training.load(folder)
    training.save(folder / name, 2)
    _run_two_more_steps(training, folder / name)


def run_all_layouts(
    rank: int, bases: dict[str, Layout], layouts: dict[str, dict[str, Layout]], folder: Path
) -> None:
    """Run the base layouts on a rank, and continue their runs in other layouts."""
    for name, base in bases.items():
        run_base(base, folder / name)
    for name, resumed_layouts in layouts.items():
        for resumed_name, layout in resumed_layouts.items():
            run_resumed(layout, folder / name, resumed_name)


DROPOUT = Layout("one_f_one_b", drops=0.2)
REPLICAS = Layout("interleaved", 2, dp=2)
BASES = {"two ranks": Layout("one_f_one_b"), "dropped": DROPOUT, "replicas": REPLICAS}
# These layouts sum in the same order, so they have the same bits.
TWO_RANKS = [
    ("split backwards", Layout("zb_h1")),
    ("a vee", Layout("zb_v", 4, placement="vee")),
    ("our executor", Layout("interleaved", 4, runtime="schedir")),
]
MORE_LAYOUTS = [
    ("the same", Layout("one_f_one_b")),
    ("all forwards first", Layout("gpipe")),
    ("two stages of each rank", Layout("interleaved", 4)),
    ("our executor, split", Layout("zb_h1", runtime="schedir")),
]
SAME_SUMS = {"two ranks": dict(cases(TWO_RANKS, MORE_LAYOUTS)), "dropped": {"dropped": DROPOUT}}
ONE_RANK = dict(
    cases(
        [("one rank", Layout("interleaved", 2))],
        [("one rank, four stages", Layout("interleaved", 4, copies=True))],
    )
)
# One rank has the tied weight once, not in two copies: autograd sums its gradient in the order of
# the backwards. That order is not the base run's, so the sum rounds differently.
ONE_TIED_COPY = ("a vee", "one rank")
TWO_REPLICAS = {"two replicas": REPLICAS}
FOUR_RANKS = {"replicas of two ranks": Layout("one_f_one_b", dp=2, ddp=True)}
NO_REPLICAS = {"no replicas": Layout("zb_h1")}


def in_process(stages: int) -> InProcessExecutor:
    """Return an executor of the same model."""
    ties = make_tied_weights(stages)
    shape = PipelineShape(2, MB, stages // 2)
    program = schedir.compile(schedir.schedules.interleaved, shape, tied_weights=ties)
    stages_by_number = tie({s: NamedStage(s, stages) for s in range(stages)}, stages)
    options: dict[str, Any] = {"loss": mse_loss, "boundary": (ROWS // MB, WIDTH), "optimizer": ADAM}
    return InProcessExecutor(program, [*stages_by_number.values()], tied_weights=ties, **options)


def steps_in_process(ranks: InProcessExecutor, first: int, end: int) -> None:
    for step in range(first, end):
        torch.manual_seed(1000 + step)
        x, y = torch.randn(2, ROWS, WIDTH)
        ranks.step(x.chunk(MB), y.chunk(MB), 1 / MB)
        for rank in ranks.executors:
            for stage in rank.stages.values():
                for buffer in stage.module.buffers():
                    buffer.add_(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    layouts = {name: dict(base_layouts) for name, base_layouts in SAME_SUMS.items()}
    layouts["two ranks"] |= TWO_REPLICAS
    layouts["replicas"] = NO_REPLICAS
    run(run_all_layouts, 2, BASES, layouts, folder)
    run(run_all_layouts, 1, {}, {"two ranks": ONE_RANK}, folder)
    run(run_all_layouts, 4, {}, {"two ranks": FOUR_RANKS}, folder)
    return folder


def find_differences(base: Path, other: Path, step: int) -> dict[str, float]:
    """Return the largest difference of each tensor that differs at a step."""
    first, second = (
        {
            name: value
            for name, value in read_checkpoint_tensors(folder, step).items()
            if not name.startswith("generators/")
        }
        for folder in (base, other)
    )
    # Four layers have four tensors each, without the tied one. Each trained weight has two moments
    # and a step.
    assert len(first) == 4 * 4 - 1 + 3 * (4 * 3 - 1 - 1)
    return compute_differences(first, second)


SAME_BITS = [(base, name) for base, of in SAME_SUMS.items() for name in of]
SAME_BITS += [("two ranks", name) for name in ONE_RANK]
CLOSE = [("two ranks", name) for name in TWO_REPLICAS | FOUR_RANKS] + [("replicas", "no replicas")]


@pytest.mark.parametrize(("base", "name"), SAME_BITS + CLOSE)
def test_any_layout_loads_and_resumes(base: str, name: str, folder: Path) -> None:
    """In the first step, only the tied weight of the layouts with one copy of it may differ.

    From the second step on, every weight depends on the tied weight.
    """
    at_2, at_3, at_4 = (
        find_differences(folder / base, folder / base / name, step) for step in (2, 3, 4)
    )
    assert not at_2
    if name in ONE_TIED_COPY:
        assert {key.split("/")[1] for key in at_3} <= {TIED}
    elif (base, name) in SAME_BITS:
        assert not at_3 and not at_4
    assert (base, name) in SAME_BITS or at_4
    assert max(at_4.values(), default=0.0) < 1e-6


@pytest.mark.filterwarnings("ignore:the seed of modules is")
@pytest.mark.parametrize("stages", [2, 4])
def test_executor_resumes_from_schedule_checkpoint(stages: int, folder: Path) -> None:
    ranks = in_process(stages)
    load(ranks, folder / "two ranks", step=2, name_map=keep_name)
    steps_in_process(ranks, 2, 4)
    target = folder / "two ranks" / f"executor {stages}"
    save(ranks, target, step=4, name_map=keep_name)
    assert not find_differences(folder / "two ranks", target, 4)
