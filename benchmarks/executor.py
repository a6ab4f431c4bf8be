"""Measure the overhead of the executor, compared with the runtime of torch.distributed.pipelining.

    python benchmarks/executor.py [--pairs 15] [--box | --drop-in [--model gpt]]

All runtimes run one program, compiled with overlap, in the same processes of one thread each. The
script runs one step of each runtime in turn. torch's runtime reads the program as CSV.

The first table has steps of one process, which is rank 1 of torch's "fake" backend. Messages of
this backend arrive at once. "own" is the overhead per instruction: the time of a step minus the
forward, loss and backward of the stages, which a plain loop measures. It includes the calls of
c10d.

The second table has steps with a process for each rank. schedir uses shared memory, as `schedir
train` does on one machine, and Gloo. torch uses Gloo. "step" is the wall time on rank 0. "own" is
the overhead in CPU time of the threads that run the ranks. It includes their waits, but not Gloo's
threads. Rows in which this difference would be noise do not have it. Each figure is a median over
steps. Ratios are medians over pairs of steps.

With `--box`, the script measures only the black box. One process alternates steps that write each
instruction to a black box with steps that do not.

With `--drop-in`, the script measures only replacements of torch's schedules. Four processes over
Gloo run three pipelines with the same weights: torch's schedule,
`schedir.torch_pipelining.Schedule` of the same name in torch's runtime, and this schedule in
schedir's executor. The script runs one step of each in turn. Each round begins with another
pipeline. A step begins when all ranks leave a barrier. Its time is that of the slowest rank.
Gradients are set to None between steps, outside of the measured time. A ratio compares two steps of
a round: the median and, in brackets, its 95 % confidence interval. "CPU" is the ratio of the
processor times of all ranks together, including Gloo's threads. Other jobs on the machine change it
less than the wall time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import thread_time
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.distributed.pipelining.stage import PipelineStage
from torch.testing._internal.distributed.fake_pg import FakeStore

from schedir.runtime.executor_options import ExecutionOptions

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import schedir
from benchmarks.harness import (
    WARM_UP_STEPS,
    Times,
    format_milliseconds,
    format_pair_ratios,
    gather_times,
    measure_in_rounds,
    parse,
    print_header,
    print_row,
    run_on_ranks,
)
from schedir import PipelineShape, schedules
from schedir.io import torch_csv
from schedir.io.black_box import BlackBox
from schedir.ir.program import Program
from schedir.models import gpt
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.executor import Executor
from schedir.torch_pipelining import Schedule
from schedir.transports.gloo import GlooTransport
from schedir.transports.json_collectives import RecordTypes
from schedir.transports.shared_memory import SharedMemoryTransport
from schedir.transports.transport import Transport

RUNTIMES = ("shared", "gloo", "torch")
# Model, schedule, ranks, stages per rank, microbatches.
Row = tuple[str, str, int, int, int]
FAKE_BACKEND_ROWS: list[Row] = [
    ("tiny", "one_f_one_b", 4, 1, 256),
    ("tiny", "interleaved", 4, 2, 128),
    ("tiny", "interleaved_zb", 4, 2, 128),
]
PROCESS_ROWS: list[Row] = [
    (model, schedule, ranks, v, m)
    for model, m in (("tiny", 64), ("gpt", 16))
    for ranks in (2, 4)
    for schedule, v in (("one_f_one_b", 1), ("interleaved", 2))
]
SMOKE_FAKE_BACKEND_ROWS: list[Row] = [
    ("tiny", "one_f_one_b", 4, 1, 8),
    ("tiny", "interleaved_zb", 4, 2, 8),
]
SMOKE_PROCESS_ROWS: list[Row] = [("tiny", "interleaved", 2, 2, 4), ("gpt", "one_f_one_b", 2, 1, 2)]
FAKE_BACKEND_RANK = 1  # an inner rank, which sends to and receives from both neighbours


class Model(NamedTuple):
    """A model in stages, and a batch; `inputs[mb]` is a microbatch."""

    stages: list[nn.Module]
    inputs: Tensor
    targets: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]
    boundary: tuple[int, ...]


class TinyStage(nn.Module):
    """A stage with almost no work."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((8,), 0.9))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def sum_squared_errors(y: Tensor, target: Tensor) -> Tensor:
    """Return the sum of squared errors."""
    return (y - target).square().sum()


def build_tiny_model(stages: int, m: int) -> Model:
    """Return a model with almost no work, on microbatches of eight numbers."""
    x = torch.randn(m, 1, 8, generator=torch.Generator().manual_seed(0))
    return Model([TinyStage() for _ in range(stages)], x, x + 1, sum_squared_errors, (1, 8))


def build_small_gpt(stages: int, m: int) -> Model:
    """Return a GPT of 8 layers, hidden 128, on microbatches of 2 x 64 tokens."""
    config = gpt.GPTConfig(layers=8, hidden=128, context=64, tied=False)
    tokens = torch.randint(256, (m, 2, 65), generator=torch.Generator().manual_seed(0))
    built: list[nn.Module] = [gpt.build_stage(config, s, stages) for s in range(stages)]
    return Model(built, tokens[:, :, :-1], tokens[:, :, 1:], gpt.loss, (2, 64, 128))


MODELS = {"tiny": build_tiny_model, "gpt": build_small_gpt}


class FakeTransport(GlooTransport):
    """Gloo's transport over torch's "fake" backend, in which only one rank exists.

    The backend completes each message at once.
    """

    def check_agreement(
        self, facts: Mapping[str, str], payload: object = None, record_types: RecordTypes = ()
    ) -> list[Any]:
        """Return the payload of this process, because no other process exists."""
        return [payload]


class RuntimeBenchmark:
    """One rank in all runtimes, and the work of its stages without a runtime."""

    def __init__(
        self, row: Row, rank: int, transports: Mapping[str, Callable[[Program], Transport]]
    ) -> None:
        name, schedule, ranks, v, self.m = row
        shape = PipelineShape(ranks, self.m, v)
        program = schedir.compile(
            getattr(schedules, schedule), shape, progress_model="per_edge", overlap=True
        )
        self.rank_stages, self.last = shape.stages_on_rank[rank], shape.stages - 1
        self.model, torch_model = (MODELS[name](shape.stages, self.m) for _ in range(2))
        self.steps: dict[str, Callable[[], Any]] = {}
        models = [self.model, torch_model]
        for transport_name, make_transport in transports.items():
            model = MODELS[name](shape.stages, self.m)
            models.append(model)
            executor = Executor(
                program,
                rank,
                {s: model.stages[s] for s in self.rank_stages},
                make_transport(program),
                loss=model.loss,
                boundary=Boundary(model.boundary),
                execution=ExecutionOptions(record_timestamps=False),
            )
            self.steps[transport_name] = partial(
                executor.step, list(model.inputs), list(model.targets)
            )
        runtime = _PipelineScheduleRuntime(
            [self._build_torch_stage(torch_model, s, shape.stages) for s in self.rank_stages],
            n_microbatches=self.m,
            loss_fn=torch_model.loss,
            scale_grads=False,
        )
        with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
            file.write(torch_csv.to_csv(program))
            file.flush()
            runtime._load_csv(file.name)
        args = (torch_model.inputs.flatten(0, 1),) if 0 in self.rank_stages else ()
        target = torch_model.targets.flatten(0, 1) if self.last in self.rank_stages else None
        self.modules = [m.stages[s] for m in models for s in self.rank_stages]
        self.counts = dict.fromkeys(transports, len(program.streams[rank]))
        self.counts["torch"] = len([a for a in runtime.pipeline_order_with_comms[rank] if a])
        self.steps["torch"] = partial(runtime.step, *args, target=target, return_outputs=False)
        self.steps["work"] = self._work

    def _build_torch_stage(self, model: Model, stage: int, stages: int) -> PipelineStage:
        # Shapes are given, because without a transport torch's stages cannot exchange them.
        zeros = torch.zeros(model.boundary, requires_grad=True)
        stage_input = model.inputs[0] if stage == 0 else zeros
        stage_output = model.stages[stage](stage_input).detach().requires_grad_()
        return PipelineStage(
            model.stages[stage], stage, stages, torch.device("cpu"),
            input_args=stage_input, output_args=stage_output,
            input_grads=None if stage == 0 else torch.zeros(model.boundary),
            output_grads=None if stage == stages - 1 else torch.zeros(model.boundary),
        )  # fmt: skip

    def _work(self) -> None:
        """Run each forward, loss and backward of the stages in a plain loop."""
        model = self.model
        for s in self.rank_stages:
            for mb in range(self.m):
                x = model.inputs[mb] if s == 0 else torch.zeros(model.boundary, requires_grad=True)
                y, dy = model.stages[s](x), None
                if s == self.last:
                    y = model.loss(y, model.targets[mb])
                else:
                    dy = torch.zeros(model.boundary)
                torch.autograd.backward(y, dy)

    def run(self, pairs: int, wait: Callable[[], Any]) -> dict[str, Times]:
        """Return the wall and CPU seconds of each step, by runtime."""

        def prepare() -> None:
            for module in self.modules:
                module.zero_grad(set_to_none=False)
            wait()

        return measure_in_rounds(self.steps, pairs, prepare, rotate=False, clock=thread_time)


class Result(NamedTuple):
    """The measurements of one rank."""

    times: dict[str, Times]
    counts: dict[str, int]

    def compute_overhead(self, runtime: str) -> float:
        """Return the CPU time minus the work of the stages, in microseconds per instruction."""
        step, work = (statistics.median(cpu for _, cpu in self.times[w]) for w in (runtime, "work"))
        return (step - work) / self.counts[runtime] * 1e6


def measure_processes(rank: int, row: Row, pairs: int) -> Result:
    """Measure a row as one of its processes."""
    bench = RuntimeBenchmark(row, rank, {"shared": SharedMemoryTransport, "gloo": GlooTransport})
    return Result(bench.run(pairs, dist.barrier), bench.counts)


def measure_fake_backend(_: int, row: Row, pairs: int) -> Result:
    """Measure a row in one process with torch's "fake" backend."""
    enter_fake_world(row)
    # torch's stages exchange shapes with all ranks. No other rank exists here.
    PipelineStage._warmup_backward_result = lambda *_, **__: torch.ones(1)  # type: ignore[method-assign]
    bench = RuntimeBenchmark(row, FAKE_BACKEND_RANK, {"alone": FakeTransport})
    return Result(bench.run(pairs, lambda: None), bench.counts)


def enter_fake_world(row: Row) -> None:
    """Make this process one rank of torch's "fake" backend."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=FAKE_BACKEND_RANK, world_size=row[2])


def run_without_black_box(executor: Executor) -> None:
    """Run the instructions of a step without writes to a black box."""
    executor.resources.is_in_step = True
    try:
        for wait, run in executor.runner.calls:
            if wait is not None:
                wait()
            run()
    except Exception as error:
        raise executor.state.wrap_error(0, error) from error


def measure_black_box(_: int, row: Row, pairs: int) -> list[float]:
    """Return the microseconds per instruction of a black box in a file, for each pair of steps."""
    enter_fake_world(row)
    model, shape = MODELS[row[0]](row[2] * row[3], row[4]), PipelineShape(row[2], row[4], row[3])
    program = schedir.compile(
        getattr(schedules, row[1]), shape, progress_model="per_edge", overlap=True
    )
    executor = Executor(
        program, FAKE_BACKEND_RANK,
        {s: model.stages[s] for s in shape.stages_on_rank[FAKE_BACKEND_RANK]},
        FakeTransport(program),
        loss=model.loss, boundary=Boundary(model.boundary),
        execution=ExecutionOptions(record_timestamps=False),
    )  # fmt: skip
    runner = executor.runner
    run_with_black_box = runner._run_instructions
    step_times: list[list[float]] = []
    with tempfile.TemporaryDirectory() as folder:
        runner.progress = BlackBox(Path(folder, "0")).values
        for round_index in range(WARM_UP_STEPS + pairs):
            pair_times = []
            for run in (run_with_black_box, partial(run_without_black_box, executor))[
                :: 1 if round_index % 2 else -1
            ]:
                runner._run_instructions = run  # type: ignore[method-assign]
                start = thread_time()
                executor.step(list(model.inputs), list(model.targets))
                pair_times.append(thread_time() - start)
            step_times.append(pair_times if round_index % 2 else pair_times[::-1])
    return [
        (a - b) / len(program.streams[FAKE_BACKEND_RANK]) * 1e6
        for a, b in step_times[WARM_UP_STEPS:]
    ]


# ------------------------------------------------------------ replacements of torch's schedules


DROP_IN_RANKS = 4


class SchedulePair(NamedTuple):
    """A schedule class of torch, and the schedule of schedir that replaces it."""

    torch_name: str
    schedir_name: str
    stages: int
    placement: str = "loop"

    def list_stages(self, rank: int) -> list[int]:
        if self.placement == "vee":
            return [rank, self.stages - 1 - rank]
        return [*range(rank, self.stages, DROP_IN_RANKS)]


DROP_IN_PAIRS = (
    SchedulePair("ScheduleGPipe", "gpipe", 4),
    SchedulePair("Schedule1F1B", "one_f_one_b", 4),
    SchedulePair("ScheduleInterleaved1F1B", "interleaved", 8),
    SchedulePair("ScheduleInterleavedZeroBubble", "zb_h1", 4),
    SchedulePair("ScheduleInterleavedZeroBubble", "interleaved_zb", 8),
    SchedulePair("ScheduleZBVZeroBubble", "zb_v", 8, "vee"),
    SchedulePair("ScheduleDualPipeV", "dualpipe_v", 8, "vee"),
)
SMOKE_DROP_IN_PAIRS = (DROP_IN_PAIRS[1], DROP_IN_PAIRS[5])
PIPELINES: tuple[Literal["theirs", "torch", "schedir"], ...] = ("theirs", "torch", "schedir")


class DropInBenchmark:
    """One rank of the three pipelines of a row."""

    def __init__(self, rank: int, kind: str, pair: SchedulePair, microbatches: int) -> None:
        rank_stages, last_stage = pair.list_stages(rank), pair.stages - 1
        self.modules: list[torch.nn.Module] = []
        self.steps: dict[str, Callable[[], Any]] = {}
        for pipeline in PIPELINES:
            torch.manual_seed(0)
            model = MODELS[kind](pair.stages, microbatches)
            self.modules += [model.stages[s] for s in rank_stages]
            stages = [
                PipelineStage(model.stages[s], s, pair.stages, torch.device("cpu"))
                for s in rank_stages
            ]
            options: dict[str, Any] = {
                "n_microbatches": microbatches,
                "loss_fn": model.loss,
                "scale_grads": False,
            }
            if pipeline == "theirs":
                single = pair.torch_name in ("ScheduleGPipe", "Schedule1F1B")
                schedule = getattr(torch_schedules, pair.torch_name)(
                    stages[0] if single else stages, **options
                )
            else:
                schedule = Schedule(
                    stages,
                    schedule=getattr(schedules, pair.schedir_name),
                    runtime=pipeline,
                    **options,
                )
            self.steps[pipeline] = partial(
                schedule.step,
                *((model.inputs.flatten(0, 1),) if 0 in rank_stages else ()),
                target=model.targets.flatten(0, 1) if last_stage in rank_stages else None,
                return_outputs=False,
            )

    def run(self, rounds: int) -> dict[str, Times]:
        """Return the wall seconds of the slowest rank and the CPU seconds of all, for each step."""

        def prepare() -> None:
            for module in self.modules:
                module.zero_grad()
            dist.barrier()

        return gather_times(measure_in_rounds(self.steps, rounds, prepare))


def measure_drop_in(
    rank: int, pairs: int, model: str, rows: Sequence[SchedulePair], smoke: bool
) -> None:
    """Measure the three pipelines of each row, and print the row on rank 0."""
    for kind, microbatches in (("gpt", 16), ("tiny", 64)):
        for pair in rows if model in ("", kind) else ():
            bench = DropInBenchmark(rank, kind, pair, 2 * DROP_IN_RANKS if smoke else microbatches)
            times = bench.run(pairs)
            if not rank:
                ratios = (format_pair_ratios(times[w], times["theirs"], 2) for w in PIPELINES[1:])
                medians = (format_milliseconds(times[w]) for w in PIPELINES)
                name = f"{pair.schedir_name}, {pair.stages} stages"
                print_row(kind, name, *medians, *(cell for cells in ratios for cell in cells))


# ------------------------------------------------------------ tables


def print_fake_backend(rows: Sequence[Row], pairs: int) -> None:
    """Print the table of steps with the "fake" backend, each row when it is measured."""
    print_header("model", "schedule", "P", "v", "m", "own, us", "torch's", "ratio")
    for row in rows:
        (result,) = run_on_ranks(measure_fake_backend, 1, row, pairs)
        schedir_overhead, torch_overhead = (
            result.compute_overhead("alone"),
            result.compute_overhead("torch"),
        )
        print_row(
            *row,
            f"{schedir_overhead:.1f}",
            f"{torch_overhead:.1f}",
            f"{schedir_overhead / torch_overhead:.2f}",
        )


def print_processes(rows: Sequence[Row], pairs: int) -> None:
    """Print the table of steps with a process for each rank, each row when it is measured."""
    print_header("model", "schedule", "P", "v", "m", "step, ms: shared", "gloo", "torch",
         "shared/torch",
         "gloo/torch", "own, us: shared", "gloo", "torch")  # fmt: skip
    for row in rows:
        results = run_on_ranks(measure_processes, row[2], row, pairs)
        steps = {
            runtime: [wall for wall, _ in times] for runtime, times in results[0].times.items()
        }
        ratios = [
            statistics.median(a / b for a, b in zip(steps[transport], steps["torch"], strict=True))
            for transport in ("shared", "gloo")
        ]
        medians = (statistics.median(steps[runtime]) * 1e3 for runtime in RUNTIMES)
        overheads = (
            statistics.mean(r.compute_overhead(runtime) for r in results) for runtime in RUNTIMES
        )
        print_row(
            *row,
            *(f"{ms:.1f}" for ms in medians),
            *(f"{ratio:.2f}" for ratio in ratios),
            *(f"{us:.1f}" if row[0] == "tiny" else "" for us in overheads),
        )


def print_black_box(row: Row, pairs: int) -> None:
    """Print the cost of a black box."""
    (costs,) = run_on_ranks(measure_black_box, 1, row, pairs)
    costs.sort()
    low, high = costs[len(costs) // 4], costs[-1 - len(costs) // 4]
    print(f"{statistics.median(costs):.3f} us an instruction, half of {pairs} pairs from "
          f"{low:.3f} to {high:.3f}")  # fmt: skip


def print_drop_in(pairs: int, model: str, smoke: bool) -> None:
    """Print the table of replaced schedules of torch, each row when it is measured."""
    print_header("model", "schedule", "step, ms: torch's", "runtime=torch", "runtime=schedir",
         "torch: ratio", "CPU", "schedir: ratio", "CPU")  # fmt: skip
    rows = SMOKE_DROP_IN_PAIRS if smoke else DROP_IN_PAIRS
    run_on_ranks(measure_drop_in, DROP_IN_RANKS, pairs, model, rows, smoke)


def main() -> None:
    """Print the tables of the options; with `--smoke`, print all with a few small rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=15, help="number of steps of each runtime")
    parser.add_argument("--box", action="store_true", help="measure only the cost of a black box")
    parser.add_argument(
        "--drop-in", action="store_true", help="only compare with torch's schedules"
    )
    parser.add_argument("--model", default="", choices=("", *MODELS), help="rows of --drop-in")
    args = parse(parser, pairs=1, model="tiny")
    by_one, by_all = (
        (SMOKE_FAKE_BACKEND_ROWS, SMOKE_PROCESS_ROWS)
        if args.smoke
        else (FAKE_BACKEND_ROWS, PROCESS_ROWS)
    )
    if args.box or args.smoke:
        print_black_box(by_one[0], args.pairs)
    if args.drop_in or args.smoke:
        print_drop_in(args.pairs, args.model, args.smoke)
    if not (args.box or args.drop_in):
        print_fake_backend(by_one, args.pairs)
        print()
        print_processes(by_all, args.pairs)


if __name__ == "__main__":
    main()
