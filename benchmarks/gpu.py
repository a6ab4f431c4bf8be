"""On one GPU: stages, instructions, and four virtual ranks, beside the goals for them.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --only stage

One table, and exit code 1 if a goal is missed or a part fails, which holds up no other.  All times
are between CUDA events.

- `stage`: transformer layers in bfloat16, forward and backward, as model FLOP/s; beside the rate
  that their shapes allow, which is that of their products and attention alone, and the rate of a
  large bfloat16 product, all in the same run.
- `instruction`: a step over tiny stages of one rank, whose inputs are always ready: what an
  instruction takes beyond the same forwards and backwards in a plain loop.

Four virtual ranks run 1F1B, each on streams of its own, and record it.  `gap`: between two
instructions of a compute lane, where the second has all that it waits for; recording is part of
it, and `two events` says how much.  `exposed transfers`: the share of the steady phase that ranks
wait for a message.  `step, predicted`: how far the span of a step is from the simulation at the
costs that the step before it has measured.

- `sleep`: a stage holds one multiprocessor for a set time and sends activations of a real size.  So
  ranks share next to nothing, as if each had a GPU: this is what the executor, its waits and the
  simulation are worth.
- `gpt`: transformer stages that share the multiprocessors: an instruction takes as long as the
  others let it.  Costs are means of that run.  Where fewer ranks are busy, as a step begins and
  ends, instructions are faster than the mean, so a prediction is too long: it has m + 3 times the
  mean of a forward and a backward, of which a rank has m within the step, so by at most 3 / m.
  `host waits`: how often a step, with clipping and AdamW, makes the host wait for the GPU.
  `peak memory, predicted`: how far the most that torch's allocator has held is from the
  prediction: weights, gradients and optimizer of all ranks, and what their microbatches keep in
  the order in which the host issues them.

Nothing here runs over NCCL: processes that share a GPU take turns on it, for milliseconds each, and
no figure of overlap means anything there.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from torch import Tensor, nn

import schedir
from benchmarks import figures, gpu_stage
from benchmarks.figures import Figure
from benchmarks.gpu_stage import gpt_stage, seconds
from benchmarks.harness import lacks, parse
from benchmarks.host_waits import host_waits
from schedir import Costs, Plan, Program, Timeline, compile
from schedir.errors import UsageError
from schedir.ir.sizes import Sizes
from schedir.predict.bubble_causes import exposed, ready_gaps
from schedir.predict.calibrate import calibrate
from schedir.predict.timeline import spans_of
from schedir.runtime.boundary import Boundary
from schedir.runtime.device_memory import times_asked
from schedir.runtime.executor import WARM
from schedir.runtime.inprocess import InProcess
from schedir.runtime.precision import MainOptimizer
from schedir.runtime.sizes import sizes_of
from schedir.schedules import one_f_one_b
from schedir.testing import tiny
from schedir.training import gpt
from schedir.transports.cuda import require_gpus

RANKS = 4


def main() -> int:
    parser = argparse.ArgumentParser(description="stages, instructions and ranks, on one GPU")
    parser.add_argument("--only", choices=PARTS, action="append", help="a part; may be repeated")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=2, help="of a stage")
    parser.add_argument("--product", type=int, default=8192, help="side of the large product")
    parser.add_argument("--microbatches", type=int, default=64, help="of the GPT's ranks")
    parser.add_argument("--forward", type=float, default=1.0, help="of ranks that sleep, in ms")
    parser.add_argument("--steps", type=int, default=8, help="that are measured of each kind")
    parser.add_argument("--figures", type=Path, help="a file to which each figure is added")
    options = parse(
        parser, hidden=128, context=16, layers=1, product=128, microbatches=4, steps=2, forward=0.1
    )
    # Streams that share a hardware queue wait for each other, and four ranks have more than 8.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    try:
        require_gpus(1)
    except UsageError as error:
        return lacks(str(error), options.smoke)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    return int(not table(options))


def table(options: argparse.Namespace) -> bool:
    """Print and write each figure as it is measured; whether all parts ran and met their goals."""
    print(f"{'':44} {'':>9} {'':8} {'goal':>6}")
    met = True
    for name in options.only or PARTS:
        try:
            for figure in PARTS[name](options):
                print(figure, flush=True)
                figures.write(options.figures, figure)
                met = met and not figure.missed
        except Exception as error:
            traceback.print_exc()
            print(f"not measured, or not all of it: {name}: {type(error).__name__}", flush=True)
            met = False
    return met


def of_stage(options: argparse.Namespace) -> Iterator[Figure]:
    shape = options.hidden, options.context, options.layers
    most = gpu_stage.product_rate(options.product)
    yield Figure(f"product of side {options.product}", most / 1e12, "TFLOP/s")
    allowed, rate = gpu_stage.allowed_rate(*shape), gpu_stage.stage_rate(*shape)
    yield Figure(f"products of a stage of hidden {options.hidden}", allowed / 1e12, "TFLOP/s")
    yield Figure(f"stage of hidden {options.hidden}", rate / 1e12, "TFLOP/s")
    yield Figure("  of the large product's", 100 * rate / most, "%")
    yield Figure("  of its own products'", 100 * rate / allowed, "%", figures.STAGE)


def of_instruction(options: argparse.Namespace) -> Iterator[Figure]:
    yield Figure("one rank, an instruction", instruction_cost(), "us", figures.GAP)
    yield Figure("two events, one after the other", 1e6 * two_events(), "us")


def of_sleepers(options: argparse.Namespace) -> Iterator[Figure]:
    boundary = Boundary((1, options.context, options.hidden), torch.bfloat16)
    ranks = sleeping(16, boundary, round(options.forward / 1e3 * cycles_a_second()))
    inputs = torch.randn(16, *boundary.shape, device=gpu_stage.DEVICE, dtype=boundary.dtype)
    step = partial(ranks.step, inputs, inputs)
    yield from of_ranks("ranks that sleep", recorded(ranks, step, options.steps))


def of_gpt(options: argparse.Namespace) -> Iterator[Figure]:
    layers, hidden, context = RANKS * options.layers, options.hidden, options.context
    config = gpt.GPTConfig(256, layers, hidden, max(1, hidden // 128), context, tied=False)
    yield from of_a_gpt(config, options.microbatches, options.steps)


PARTS: Final[dict[str, Callable[[argparse.Namespace], Iterator[Figure]]]] = {
    "stage": of_stage,
    "instruction": of_instruction,
    "sleep": of_sleepers,
    "gpt": of_gpt,
}


# ---------------------------------------------------------------- one instruction


def instruction_cost(microbatches: int = 256) -> float:
    """Microseconds of a Forward or Backward beyond what it runs, on one rank without a recorder."""
    (stage,) = tiny.tiny_stages(1)
    stage.to(gpu_stage.DEVICE)
    inputs, targets = (x.to(gpu_stage.DEVICE) for x in tiny.batch(microbatches))
    boundary = Boundary((2, tiny.WIDTH), torch.float64)
    program = compile(one_f_one_b, Plan(1, microbatches))
    world = InProcess(program, [stage], loss=tiny.loss, boundary=boundary, record=False)
    rank = world.ranks[0]

    def plain() -> None:
        for x, target in zip(inputs, targets, strict=True):
            tiny.loss(stage(x), target).backward()

    own = seconds(lambda: rank.step(inputs, targets)) - seconds(plain)
    return own / (2 * microbatches) * 1e6


def two_events(times: int = 100) -> float:
    """Seconds between two events, recorded one after the other behind work."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * times)]
    torch.cuda._sleep(10_000_000)  # until the host is ahead
    for event in events:
        event.record()
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


def program_of(microbatches: int, clip: bool = False) -> Program:
    """1F1B on four ranks, with receives posted early and no more slots than it needs."""
    costs, plan = Costs(F=1, B=2, send=0.02), Plan(RANKS, microbatches)
    return compile(
        one_f_one_b, plan, model="edge", costs=costs, overlap=True, slots="enough", clip=clip
    )


def sleeping(microbatches: int, boundary: Boundary, cycles: int) -> InProcess:
    """Ranks whose forwards last so many cycles; any numbers of the boundary are their input."""
    stages = [Sleeper(cycles, boundary.dtype).to(gpu_stage.DEVICE) for _ in range(RANKS)]
    return InProcess(
        program_of(microbatches),
        stages,
        loss=lambda y, _: y.sum(dtype=torch.float32),
        boundary=boundary,
    )


def recorded(ranks: InProcess, step: Callable[[], object], steps: int) -> list[Timeline]:
    """Timelines of some steps, after two more."""
    found = []
    for _ in range(WARM + steps):
        step()
        found.append(ranks.timeline())
    return found[WARM:]


def of_ranks(name: str, runs: Sequence[Timeline]) -> Iterator[Figure]:
    """What Timelines of virtual ranks, at least two, tell."""
    gaps = 1e6 * np.concatenate([ready_gaps(run) for run in runs])
    yield Figure(f"{name}: gap, median", float(np.median(gaps)), "us", figures.GAP)
    yield Figure("  gap, 9 of 10 are less", float(np.percentile(gaps, 90)), "us")
    yield Figure("  exposed transfers", 100 * median(map(exposed, runs)), "%", figures.EXPOSED)
    yield Figure("  step", 1e3 * median(run.span for run in runs), "ms")
    off = [
        schedir.simulate(run.program, calibrate(run), model=run.model, blocks=run.blocks).span
        / after.span
        - 1
        for run, after in pairwise(runs)
    ]
    yield Figure("  step, predicted, off by", 100 * median(map(abs, off)), "%", figures.STEP)


def of_a_gpt(config: gpt.GPTConfig, microbatches: int, steps: int) -> Iterator[Figure]:
    """The same of a GPT's ranks, and their memory."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    boundary = Boundary((1, config.context, config.hidden), torch.bfloat16)
    stages = [gpt_stage(config, s, RANKS) for s in range(RANKS)]
    inputs, targets = torch.randint(
        0, config.vocab, (2, microbatches, 1, config.context), device=gpu_stage.DEVICE
    )
    sizes = sizes_of(
        stages, inputs[0], targets[0], loss=gpt.loss, boundary=boundary, state=12.0
    )  # fmt: skip
    ranks = InProcess(
        program_of(microbatches, clip=True),
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
    device = torch.device(gpu_stage.DEVICE)
    asked = times_asked(device)
    runs = recorded(ranks, partial(ranks.step, inputs, targets, scale), steps)
    held = torch.cuda.max_memory_allocated() - before
    yield from of_ranks("ranks of a GPT", runs)
    with host_waits() as waits:
        ranks.step(inputs, targets, scale)
    yield Figure("  host waits in a step", len(waits), "", figures.WAITS)
    yield Figure("  device asked for memory, in all steps", times_asked(device) - asked, "")
    predicted = peak(ranks, sizes) + inputs.nbytes + targets.nbytes
    yield Figure("  peak memory", held / 2**30, "GiB")
    yield Figure(
        "  peak memory, predicted, off by", 100 * abs(predicted / held - 1), "%", figures.MEMORY
    )


def peak(ranks: InProcess, sizes: Sizes) -> float:
    """The most bytes that all ranks hold at once, in the order in which the host issues them: by
    that an allocator counts, whenever the GPU runs them."""
    offsets = ranks.program.offsets
    turns = ranks.turns_of[ranks.program.digest].in_turn
    at = np.array([offsets[rank] + index for rank, index in turns])
    turn = np.empty(len(at))
    turn[at] = np.arange(len(at))
    spans = spans_of(ranks.program, turn, turn + 0.5)
    return Timeline(ranks.program, spans, sizes=sizes).peak_together


if __name__ == "__main__":
    sys.exit(main())
