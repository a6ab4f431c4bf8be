"""On one GPU: stages, instructions, and four virtual ranks, beside the goals for them.

    python benchmarks/gpu.py

One table, and exit code 1 if a goal is missed.  All times are between CUDA events.

- `stage`: transformer layers in bfloat16, forward and backward, as model FLOP/s over the rate of a
  large bfloat16 product in the same run.
- `one rank`: a step over tiny stages, whose inputs are always ready: what an instruction takes
  beyond the same forwards and backwards in a plain loop; issued one by one, and as a CUDA graph.

Four virtual ranks run 1F1B, each on streams of its own, and record it.  `gap`: between two
instructions of a compute lane, where the second has all that it waits for; recording is part of
it, and `two events` says how much.  `exposed transfers`: the share of the steady phase that ranks
wait for a message.  `step, predicted`: how far the span of a step is from the simulation at the
costs that the step before it has measured.

- `ranks that sleep`: a stage holds one multiprocessor for a set time and sends activations of a
  real size.  So ranks share next to nothing, as if each had a GPU: this is what the executor, its
  waits and the simulation are worth.  One by one, and as a CUDA graph.
- `ranks of a GPT`: transformer stages that share the multiprocessors: an instruction takes as long
  as the others let it.  Costs are means of that run.  Where fewer ranks are busy, as a step begins
  and ends, instructions are faster than the mean, so a prediction is too long: it has m + 3 times
  the mean of a forward and a backward, of which a rank has m within the step, so by at most 3 / m.
  `peak memory, predicted`: how far the most that torch's allocator has held is from the
  prediction: weights, gradients and optimizer of all ranks, and what their microbatches keep in
  the order in which the host issues them.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import schedir
from schedir import Costs, Plan, Program, Timeline, compile
from schedir.errors import UsageError
from schedir.ir.sizes import Sizes
from schedir.predict.bubble_causes import exposed, ready_gaps
from schedir.predict.calibrate import calibrate
from schedir.predict.timeline import spans_of
from schedir.runtime.executor import WARM
from schedir.runtime.graphs import GraphedStep
from schedir.runtime.inprocess import InProcess
from schedir.runtime.precision import MainOptimizer, float32_gradients
from schedir.runtime.rank import Boundary
from schedir.runtime.sizes import sizes_of
from schedir.schedules import one_f_one_b
from schedir.testing import tiny
from schedir.training import gpt
from schedir.transports.cuda import require_gpus

DEVICE = "cuda"
RANKS = 4
EAGER, GRAPHED = 10.0, 3.0  # us: goals for a gap and an instruction
EXPOSED, STEP, MEMORY = 2.0, 5.0, 2.0  # %


class Figure(NamedTuple):
    """A line of the table; the goal, if there is one, is the most that it may be."""

    name: str
    value: float
    unit: str
    goal: float | None = None

    @property
    def missed(self) -> bool:
        return self.goal is not None and not self.value <= self.goal

    def __str__(self) -> str:
        goal = "" if self.goal is None else f"{self.goal:g}"
        return f"{self.name:44} {self.value:9.2f} {self.unit:8} {goal:>6}{' missed' * self.missed}"


def main() -> int:
    parser = argparse.ArgumentParser(description="stages, instructions and ranks, on one GPU")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=2, help="of a stage")
    parser.add_argument("--product", type=int, default=8192, help="side of the large product")
    parser.add_argument("--microbatches", type=int, default=64, help="of the GPT's ranks")
    parser.add_argument("--forward", type=float, default=1.0, help="of ranks that sleep, in ms")
    parser.add_argument("--steps", type=int, default=8, help="that are measured of each kind")
    options = parser.parse_args()
    # Streams that share a hardware queue wait for each other, and four ranks have more than 8.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    try:
        require_gpus(1)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    print(f"{'':44} {'':>9} {'':8} {'goal':>6}")
    missed = False
    for figure in figures(options):
        print(figure, flush=True)
        missed = missed or figure.missed
    return int(missed)


def figures(options: argparse.Namespace) -> Iterator[Figure]:
    hidden, context, steps = options.hidden, options.context, options.steps
    most = product_rate(options.product)
    rate = stage_rate(hidden, context, options.layers)
    yield Figure(f"product of side {options.product}", most / 1e12, "TFLOP/s")
    yield Figure(f"stage of hidden {hidden}", rate / 1e12, "TFLOP/s")
    yield Figure("  of the product's", 100 * rate / most, "%")
    alone, whole = instruction_costs()
    yield Figure("one rank, an instruction", alone, "us", EAGER)
    yield Figure("one rank, an instruction of a graph", whole, "us", GRAPHED)
    yield Figure("two events, one after the other", 1e6 * two_events(), "us")
    yield Figure("two events of a graph", 1e6 * two_events(graph=True), "us")

    boundary = Boundary((1, context, hidden), torch.bfloat16)
    ranks = sleeping(16, boundary, round(options.forward / 1e3 * cycles_a_second()))
    inputs = torch.randn(16, *boundary.shape, device=DEVICE, dtype=boundary.dtype)
    step: Callable[[], object] = partial(ranks.step, inputs, inputs)
    yield from of_ranks("ranks that sleep", recorded(ranks, step, steps), EAGER)
    step = captured(ranks, inputs, inputs)
    yield from of_ranks("ranks that sleep, as a graph", recorded(ranks, step, steps), GRAPHED)
    del ranks, inputs, step

    config = gpt.GPTConfig(
        256, RANKS * options.layers, hidden, hidden // 128, context, tied=False
    )  # fmt: skip
    yield from of_gpt(config, options.microbatches, steps)


# ---------------------------------------------------------------- one stage, one instruction


def seconds(run: Callable[[], object], times: int = 10, warm: int = 3) -> float:
    """The median of how long the GPU takes from the first to the last that a run issues."""
    taken: list[float] = []
    for _ in range(warm + times):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        run()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) / 1e3)
    return median(taken[warm:])


def product_rate(side: int) -> float:
    """FLOP/s of a square product in bfloat16."""
    a, b = (torch.randn(side, side, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    return 2 * side**3 / seconds(lambda: a @ b)


def layer_flop(hidden: int, context: int) -> int:
    """Of the products in one layer's forward over one sequence.

    24 T h^2 + 4 T^2 h (Narayanan et al., arXiv 2104.04473, appendix), with all of the attention
    matrix counted, as is the custom, although half of it is masked.
    """
    return 24 * context * hidden**2 + 4 * context**2 * hidden


def gpt_stage(config: gpt.GPTConfig, stage: int, stages: int) -> nn.Module:
    """A stage in bfloat16, with gradients in float32, on the GPU."""
    module = gpt.build_stage(config, stage, stages).to(DEVICE, torch.bfloat16)
    float32_gradients(module)
    return module


def stage_rate(hidden: int, context: int, layers: int) -> float:
    """Model FLOP/s of a middle stage, forward and backward; a backward is two forwards."""
    stage = gpt_stage(gpt.GPTConfig(256, 3 * layers, hidden, hidden // 128, context), 1, 3)
    x = torch.randn(1, context, hidden, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    flop = 3 * layers * layer_flop(hidden, context)
    return flop / seconds(lambda: stage(x).backward(dy))


def instruction_costs(microbatches: int = 256) -> tuple[float, float]:
    """Microseconds of a Forward or Backward beyond what it runs, on one rank, issued one by one
    and as a graph; nothing is recorded."""
    (stage,) = tiny.tiny_stages(1)
    stage.to(DEVICE)
    inputs, targets = (x.to(DEVICE) for x in tiny.batch(microbatches))
    boundary = Boundary((2, tiny.WIDTH), torch.float64)
    program = compile(one_f_one_b, Plan(1, microbatches))
    world = InProcess(program, [stage], loss=tiny.loss, boundary=boundary, record=False)
    rank = world.ranks[0]

    def plain() -> None:
        for x, target in zip(inputs, targets, strict=True):
            tiny.loss(stage(x), target).backward()

    def us(run: Callable[[], object], of: Callable[[], object]) -> float:
        return (seconds(run) - seconds(of)) / (2 * microbatches) * 1e6

    alone = us(lambda: rank.step(inputs, targets), plain)
    graphed = GraphedStep(rank, inputs, targets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plain()
    return alone, us(graphed.graph.replay, graph.replay)


def two_events(times: int = 100, graph: bool = False) -> float:
    """Seconds between two events, recorded one after the other behind work."""
    events = [torch.cuda.Event(enable_timing=True, external=True) for _ in range(2 * times)]

    def record() -> None:
        torch.cuda._sleep(10_000_000)  # until the host is ahead
        for event in events:
            event.record()

    record()
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            record()
        captured.replay()
    torch.cuda.synchronize()
    each = zip(events[::2], events[1::2], strict=True)
    return float(median(one.elapsed_time(other) / 1e3 for one, other in each))


# ---------------------------------------------------------------- virtual ranks


class _Sleep(torch.autograd.Function):
    """Times a weight, after so many cycles on one multiprocessor, twice as many backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, cycles: int) -> Tensor:
        ctx.cycles = cycles
        ctx.save_for_backward(weight)
        torch.cuda._sleep(cycles)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> tuple[Tensor, Tensor, None]:
        (weight,) = ctx.saved_tensors
        torch.cuda._sleep(2 * ctx.cycles)
        return dy[0] * weight, torch.zeros_like(weight), None


class Sleeper(nn.Module):
    """A stage of a set length."""

    def __init__(self, cycles: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.cycles = cycles
        self.weight = nn.Parameter(torch.ones((), dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Sleep.apply(x, self.weight, self.cycles)  # type: ignore[no-untyped-call]
        return y


def cycles_a_second() -> float:
    """Of the clock that a sleeping kernel counts."""
    return 1e8 / seconds(lambda: torch.cuda._sleep(100_000_000), times=3, warm=1)


def program_of(microbatches: int) -> Program:
    """1F1B on four ranks, with receives posted early and no more slots than it needs."""
    costs = Costs(F=1, B=2, send=0.02)
    plan = Plan(RANKS, microbatches)
    return compile(
        one_f_one_b, plan, model="edge", costs=costs, overlap=True, slots="enough"
    )  # fmt: skip


def sleeping(microbatches: int, boundary: Boundary, cycles: int) -> InProcess:
    """Ranks whose forwards last so many cycles; any numbers of the boundary are their input."""
    stages = [Sleeper(cycles, boundary.dtype).to(DEVICE) for _ in range(RANKS)]
    return InProcess(
        program_of(microbatches),
        stages,
        loss=lambda y, _: y.sum(dtype=torch.float32),
        boundary=boundary,
    )


def captured(ranks: InProcess, inputs: Tensor, targets: Tensor) -> Callable[[], object]:
    """A step of all ranks as one CUDA graph, events included."""
    aside, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(WARM):
            ranks.step(inputs, targets)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=aside, capture_error_mode="thread_local"):
        ranks.step(inputs, targets)
    return graph.replay


def recorded(ranks: InProcess, step: Callable[[], object], steps: int) -> list[Timeline]:
    """Timelines of some steps, after two more."""
    found = []
    for _ in range(WARM + steps):
        step()
        found.append(ranks.timeline())
    return found[WARM:]


def of_ranks(name: str, runs: Sequence[Timeline], gap: float) -> Iterator[Figure]:
    """What Timelines of virtual ranks, at least two, tell."""
    gaps = 1e6 * np.concatenate([ready_gaps(run) for run in runs])
    yield Figure(f"{name}: gap, median", float(np.median(gaps)), "us", gap)
    yield Figure("  gap, 9 of 10 are less", float(np.percentile(gaps, 90)), "us")
    yield Figure("  exposed transfers", 100 * median(map(exposed, runs)), "%", EXPOSED)
    yield Figure("  step", 1e3 * median(run.span for run in runs), "ms")
    off = [
        schedir.simulate(run.program, calibrate(run), model=run.model, blocks=run.blocks).span
        / after.span
        - 1
        for run, after in pairwise(runs)
    ]
    yield Figure("  step, predicted, off by", 100 * median(map(abs, off)), "%", STEP)


def of_gpt(config: gpt.GPTConfig, microbatches: int, steps: int) -> Iterator[Figure]:
    """The same of a GPT's ranks, and their memory."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    boundary = Boundary((1, config.context, config.hidden), torch.bfloat16)
    stages = [gpt_stage(config, s, RANKS) for s in range(RANKS)]
    inputs, targets = torch.randint(
        0, config.vocab, (2, microbatches, 1, config.context), device=DEVICE
    )
    sizes = sizes_of(
        stages, inputs[0], targets[0], loss=gpt.loss, boundary=boundary, state=12.0
    )  # fmt: skip
    ranks = InProcess(
        program_of(microbatches),
        stages,
        loss=gpt.loss,
        boundary=boundary,
        optimizer=lambda p: MainOptimizer(p, partial(torch.optim.AdamW, lr=1e-5, fused=True)),
    )
    scale = 1 / targets.numel()
    for _ in range(WARM):
        ranks.step(inputs, targets, scale)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    runs = recorded(ranks, partial(ranks.step, inputs, targets, scale), steps)
    held = torch.cuda.max_memory_allocated() - before
    yield from of_ranks("ranks of a GPT", runs, EAGER)
    predicted = peak(ranks, sizes) + inputs.nbytes + targets.nbytes
    yield Figure("  peak memory", held / 2**30, "GiB")
    yield Figure("  peak memory, predicted, off by", 100 * abs(predicted / held - 1), "%", MEMORY)


def peak(ranks: InProcess, sizes: Sizes) -> float:
    """The most bytes that all ranks hold at once, in the order in which the host issues them: by
    that an allocator counts, whenever the GPU runs them."""
    offsets = ranks.program.offsets
    at = np.array([offsets[rank] + index for rank, index in ranks.turns])
    turn = np.empty(len(at))
    turn[at] = np.arange(len(at))
    spans = spans_of(ranks.program, turn, turn + 0.5)
    return Timeline(ranks.program, spans, sizes=sizes).peak_together


if __name__ == "__main__":
    sys.exit(main())
