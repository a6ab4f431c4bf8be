"""What the executor itself costs, beside torch.distributed.pipelining's runtime.

    python benchmarks/executor.py [--pairs 15] [--box]

All run one program, compiled with overlap, in the same processes, of one thread each, and take
turns, a step each; torch's reads it as CSV.

First without a transport: one process is rank 1 under torch's "fake" backend, whose messages
arrive at once.  "own" is the time of a step beyond the stages' forward, loss and backward, which
a plain loop is timed for, by instruction.  It includes the calls into c10d.

Then with a process for each rank: ours through shared memory, as `schedir train` runs on one
machine, and over Gloo, torch's over Gloo.  "step" is the wall time on rank 0, "own" the same as
above in CPU time of the threads that run the ranks: it includes what waiting costs them, but not
Gloo's threads, and is left out where the stages' work is so large that a difference to it says
nothing.  Each figure is a median over steps, ratios of steps are medians over pairs.

With --box nothing of this: steps of the process that is alone, which note each instruction in a
black box, in turn with steps of the same loop without that.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.distributed.pipelining.stage import PipelineStage

import schedir
from schedir import Plan
from schedir.dumps.box import Box
from schedir.io import torch_csv
from schedir.ir.program import Program
from schedir.runtime.boundary import Boundary
from schedir.runtime.executor import Executor
from schedir.training import gpt
from schedir.transports.processes import Gloo
from schedir.transports.shared import Shared
from schedir.transports.transport import Transport

WARM = 3
WHOSE = ("shared", "gloo", "torch")
# Model, schedule, ranks, stages per rank, microbatches.
Row = tuple[str, str, int, int, int]
ALONE: list[Row] = [
    ("tiny", "one_f_one_b", 4, 1, 256),
    ("tiny", "interleaved", 4, 2, 128),
    ("tiny", "interleaved_zb", 4, 2, 128),
]
TOGETHER: list[Row] = [
    (model, schedule, ranks, v, m)
    for model, m in (("tiny", 64), ("gpt", 16))
    for ranks in (2, 4)
    for schedule, v in (("one_f_one_b", 1), ("interleaved", 2))
]


class Model(NamedTuple):
    """A model in stages, and a batch; `inputs[mb]` is a microbatch."""

    stages: list[nn.Module]
    inputs: Tensor
    targets: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]
    boundary: tuple[int, ...]


class Tiny(nn.Module):
    """Next to no work."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((8,), 0.9))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def squares(y: Tensor, target: Tensor) -> Tensor:
    """The sum of squared errors."""
    return (y - target).square().sum()


def tiny(stages: int, m: int) -> Model:
    """Microbatches of eight numbers."""
    x = torch.randn(m, 1, 8, generator=torch.Generator().manual_seed(0))
    return Model([Tiny() for _ in range(stages)], x, x + 1, squares, (1, 8))


def small_gpt(stages: int, m: int) -> Model:
    """A GPT of 8 layers, hidden 128, on microbatches of 2 x 64 tokens."""
    config = gpt.GPTConfig(layers=8, hidden=128, context=64, tied=False)
    tokens = torch.randint(256, (m, 2, 65), generator=torch.Generator().manual_seed(0))
    built: list[nn.Module] = [gpt.build_stage(config, s, stages) for s in range(stages)]
    return Model(built, tokens[:, :, :-1], tokens[:, :, 1:], gpt.loss, (2, 64, 128))


MODELS = {"tiny": tiny, "gpt": small_gpt}


class Nowhere(Gloo):
    """The transport of a rank that is alone: c10d's calls without an end."""

    def __init__(self, rank: int) -> None:
        self.tp = self.dp = 1
        self.blocks, self.static = True, False
        self.tp_rank = self.dp_rank = 0
        self.rank, self.pipeline = rank, dist.group.WORLD
        self.groups, self.within = {}, None


class Bench:
    """Both runtimes of one rank, and its work without one."""

    def __init__(
        self, row: Row, rank: int, transports: Mapping[str, Callable[[Program], Transport]]
    ) -> None:
        name, schedule, ranks, v, self.m = row
        plan = Plan(ranks, self.m, v)
        program = schedir.compile(
            getattr(schedir.schedules, schedule), plan, model="edge", overlap=True
        )
        self.own, self.last = plan.stages_of[rank], plan.stages - 1
        self.model, other = (MODELS[name](plan.stages, self.m) for _ in range(2))
        self.steps: dict[str, Callable[[], Any]] = {}
        models = [self.model, other]
        for ours, transport in transports.items():
            model = MODELS[name](plan.stages, self.m)
            models.append(model)
            executor = Executor(
                program, rank, {s: model.stages[s] for s in self.own}, transport(program),
                loss=model.loss, boundary=Boundary(model.boundary), record=False,
            )  # fmt: skip
            self.steps[ours] = partial(executor.step, list(model.inputs), list(model.targets))
        runtime = _PipelineScheduleRuntime(
            [self._theirs(other, s, plan.stages) for s in self.own],
            n_microbatches=self.m,
            loss_fn=other.loss,
            scale_grads=False,
        )
        with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
            file.write(torch_csv.show(program))
            file.flush()
            runtime._load_csv(file.name)
        args = (other.inputs.flatten(0, 1),) if 0 in self.own else ()
        target = other.targets.flatten(0, 1) if self.last in self.own else None
        self.modules = [m.stages[s] for m in models for s in self.own]
        self.counts = dict.fromkeys(transports, len(program.streams[rank]))
        self.counts["torch"] = len([a for a in runtime.pipeline_order_with_comms[rank] if a])
        self.steps["torch"] = partial(runtime.step, *args, target=target, return_outputs=False)
        self.steps["work"] = self._work

    def _theirs(self, model: Model, stage: int, stages: int) -> PipelineStage:
        # Shapes are given: without a transport they cannot be asked for.
        zeros = torch.zeros(model.boundary, requires_grad=True)
        first = model.inputs[0] if stage == 0 else zeros
        y = model.stages[stage](first).detach().requires_grad_()
        return PipelineStage(
            model.stages[stage], stage, stages, torch.device("cpu"),
            input_args=first, output_args=y,
            input_grads=None if stage == 0 else torch.zeros(model.boundary),
            output_grads=None if stage == stages - 1 else torch.zeros(model.boundary),
        )  # fmt: skip

    def _work(self) -> None:
        """The stages' own work: each forward, loss and backward."""
        model = self.model
        for s in self.own:
            for mb in range(self.m):
                x = model.inputs[mb] if s == 0 else torch.zeros(model.boundary, requires_grad=True)
                y, dy = model.stages[s](x), None
                if s == self.last:
                    y = model.loss(y, model.targets[mb])
                else:
                    dy = torch.zeros(model.boundary)
                torch.autograd.backward(y, dy)

    def run(self, pairs: int, wait: Callable[[], Any]) -> dict[str, list[tuple[float, float]]]:
        """Wall and CPU seconds of each step, by whose it was."""
        took: dict[str, list[tuple[float, float]]] = {whose: [] for whose in self.steps}
        for turn in range(WARM + pairs):
            for whose, step in self.steps.items():
                for module in self.modules:
                    module.zero_grad(set_to_none=False)
                wait()
                began, thread = perf_counter(), thread_time()
                step()
                if turn >= WARM:
                    took[whose].append((perf_counter() - began, thread_time() - thread))
        return took


class Result(NamedTuple):
    """What one rank measured."""

    took: dict[str, list[tuple[float, float]]]
    counts: dict[str, int]

    def own(self, whose: str) -> float:
        """Microseconds of CPU time beyond the stages' work, by instruction."""
        step, work = (statistics.median(cpu for _, cpu in self.took[w]) for w in (whose, "work"))
        return (step - work) / self.counts[whose] * 1e6


def process(number: int, folder: str, row: Row, pairs: int, pipe: Any) -> None:
    """One process of a row."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if folder:
        where = Path(folder, "store").as_uri()
        dist.init_process_group("gloo", init_method=where, rank=number, world_size=row[2])
        bench = Bench(row, number, {"shared": Shared, "gloo": Gloo})
        result = bench.run(pairs, dist.barrier)
        dist.barrier()
    else:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        # Nobody answers when torch's stages ask whether all know their shapes.
        PipelineStage._warmup_backward_result = lambda *_, **__: torch.ones(1)  # type: ignore[method-assign]
        dist.init_process_group("fake", store=FakeStore(), rank=number, world_size=row[2])
        bench = Bench(row, number, {"alone": lambda _: Nowhere(number)})
        result = bench.run(pairs, lambda: None)
    pipe.send((result, bench.counts))
    pipe.close()
    os._exit(0)


def unnoted(executor: Executor) -> None:
    """`Running._run` without a black box."""
    executor.under_way = True
    try:
        for wait, run in executor.calls:
            if wait is not None:
                wait()
            run()
    except Exception as error:
        raise executor.state.failed(0, error) from error


def box_costs(row: Row, pairs: int) -> list[float]:
    """Microseconds of an instruction that a black box in a file takes, of each pair of steps."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=row[2])
    model, plan = MODELS[row[0]](row[2] * row[3], row[4]), Plan(row[2], row[4], row[3])
    program = schedir.compile(getattr(schedir.schedules, row[1]), plan, model="edge", overlap=True)
    executor = Executor(
        program, 1, {s: model.stages[s] for s in plan.stages_of[1]}, Nowhere(1),
        loss=model.loss, boundary=Boundary(model.boundary), record=False,
    )  # fmt: skip
    noted = executor._run
    took: list[list[float]] = []
    with tempfile.TemporaryDirectory() as folder:
        executor.at = Box(Path(folder, "0")).words
        for turn in range(WARM + pairs):
            own = []
            for run in (noted, partial(unnoted, executor))[:: 1 if turn % 2 else -1]:
                executor._run = run  # type: ignore[method-assign]
                began = thread_time()
                executor.step(list(model.inputs), list(model.targets))
                own.append(thread_time() - began)
            took.append(own if turn % 2 else own[::-1])
    return [(a - b) / len(program.streams[1]) * 1e6 for a, b in took[WARM:]]


def measure(row: Row, pairs: int, folder: str, numbers: Iterable[int]) -> list[Result]:
    """What the processes of a row measured; without a folder to meet in, each is alone."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for number in numbers:
        pipe, end = context.Pipe(duplex=False)
        one = context.Process(target=process, args=(number, folder, row, pairs, end))
        one.start()
        end.close()
        pipes.append(pipe)
        processes.append(one)
    results = [Result(*pipe.recv()) for pipe in pipes]
    for one in processes:
        one.join()
    return results


def line(*cells: object) -> None:
    """Print a row of a table."""
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def main() -> None:
    """Print the tables, a row as soon as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=15, help="steps of each runtime")
    parser.add_argument("--box", action="store_true", help="what a black box costs, alone")
    args = parser.parse_args()
    pairs = args.pairs
    if args.box:
        costs = sorted(box_costs(ALONE[0], pairs))
        low, high = costs[len(costs) // 4], costs[-1 - len(costs) // 4]
        print(f"{statistics.median(costs):.3f} us an instruction, half of {pairs} pairs from "
              f"{low:.3f} to {high:.3f}")  # fmt: skip
        return
    line("model", "schedule", "P", "v", "m", "own, us", "torch's", "ratio")
    line(*["---"] * 8)
    for row in ALONE:
        (alone,) = measure(row, pairs, "", [1])
        ours, torchs = alone.own("alone"), alone.own("torch")
        line(*row, f"{ours:.1f}", f"{torchs:.1f}", f"{ours / torchs:.2f}")
    print()
    line("model", "schedule", "P", "v", "m", "step, ms: shared", "gloo", "torch", "shared/torch",
         "gloo/torch", "own, us: shared", "gloo", "torch")  # fmt: skip
    line(*["---"] * 13)
    for row in TOGETHER:
        with tempfile.TemporaryDirectory() as folder:
            results = measure(row, pairs, folder, range(row[2]))
        steps = {whose: [wall for wall, _ in took] for whose, took in results[0].took.items()}
        ratios = [
            statistics.median(a / b for a, b in zip(steps[ours], steps["torch"], strict=True))
            for ours in ("shared", "gloo")
        ]
        medians = (statistics.median(steps[whose]) * 1e3 for whose in WHOSE)
        own = (statistics.mean(r.own(whose) for r in results) for whose in WHOSE)
        line(
            *row,
            *(f"{ms:.1f}" for ms in medians),
            *(f"{ratio:.2f}" for ratio in ratios),
            *(f"{us:.1f}" if row[0] == "tiny" else "" for us in own),
        )


if __name__ == "__main__":
    main()
