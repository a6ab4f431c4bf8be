"""On one GPU: how fast a stage is beside a large product, and what an instruction costs.

    python benchmarks/gpu.py

Two tables, all times medians between CUDA events:

- a stage of transformer layers in bfloat16, forward and backward, as model FLOP/s over the rate of
  a large bfloat16 product in the same run;
- a step of one rank over tiny stages, whose inputs are always ready: what it takes beyond the same
  forwards and backwards in a plain loop, by instruction; issued one by one, and as a CUDA graph.
  The goal is at most 10 us and 3 us.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from statistics import median

import torch

from schedir import compile, gpt
from schedir.errors import UsageError
from schedir.plan import Plan
from schedir.runtime import tiny
from schedir.runtime.cuda import require_gpus
from schedir.runtime.graphs import GraphedStep
from schedir.runtime.inprocess import InProcess
from schedir.runtime.precision import float32_gradients
from schedir.runtime.rank import Boundary
from schedir.schedules import one_f_one_b

GOALS = {"one by one": 10.0, "as a graph": 3.0}  # us


def main() -> int:
    parser = argparse.ArgumentParser(description="a stage and an instruction, on a GPU")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=2, help="of the stage")
    parser.add_argument("--product", type=int, default=8192, help="side of the large product")
    parser.add_argument("--microbatches", type=int, default=256, help="of the tiny stage")
    options = parser.parse_args()
    try:
        require_gpus(1)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")

    most = product_rate(options.product)
    rate = stage_rate(options.hidden, options.context, options.layers)
    print(f"\n{'':28} {'TFLOP/s':>8} {'of it':>6}")
    print(f"{f'product of side {options.product}':28} {most / 1e12:8.1f} {1:6.2f}")
    print(f"{f'stage of hidden {options.hidden}':28} {rate / 1e12:8.1f} {rate / most:6.2f}")

    print(f"\n{'an instruction':28} {'us':>8} {'goal':>6}")
    missed = False
    for name, us in instruction_costs(options.microbatches).items():
        missed = missed or us > GOALS[name]
        print(f"{name:28} {us:8.2f} {GOALS[name]:6.0f}")
    return int(missed)


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
    a, b = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * side**3 / seconds(lambda: a @ b)


def layer_flop(hidden: int, context: int) -> int:
    """Of the products in one layer's forward over one sequence.

    24 T h^2 + 4 T^2 h (Narayanan et al., arXiv 2104.04473, appendix), with all of the attention
    matrix counted, as is the custom, although half of it is masked.
    """
    return 24 * context * hidden**2 + 4 * context**2 * hidden


def stage_rate(hidden: int, context: int, layers: int) -> float:
    """Model FLOP/s of a middle stage, forward and backward; a backward is two forwards."""
    config = gpt.GPTConfig(256, 3 * layers, hidden, hidden // 128, context)
    stage = gpt.build_stage(config, 1, 3).to("cuda", torch.bfloat16)
    float32_gradients(stage)
    x = torch.randn(1, context, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    flop = 3 * layers * layer_flop(hidden, context)
    return flop / seconds(lambda: stage(x).backward(dy))


def instruction_costs(microbatches: int) -> dict[str, float]:
    """Microseconds of a Forward or Backward beyond what it runs, on one rank."""
    (stage,) = tiny.tiny_stages(1)
    stage.cuda()
    inputs, targets = (x.cuda() for x in tiny.batch(microbatches))
    boundary = Boundary((2, tiny.WIDTH), torch.float64)
    program = compile(one_f_one_b, Plan(1, microbatches))
    rank = InProcess(program, [stage], loss=tiny.loss, boundary=boundary).ranks[0]

    def plain() -> None:
        for x, target in zip(inputs, targets, strict=True):
            tiny.loss(stage(x), target).backward()

    def us(run: Callable[[], object], of: Callable[[], object]) -> float:
        return (seconds(run) - seconds(of)) / (2 * microbatches) * 1e6

    costs = {"one by one": us(lambda: rank.step(inputs, targets), plain)}
    graphed = GraphedStep(rank, inputs, targets)
    alone = torch.cuda.CUDAGraph()
    with torch.cuda.graph(alone):
        plain()
    costs["as a graph"] = us(graphed.graph.replay, alone.replay)
    return costs


if __name__ == "__main__":
    sys.exit(main())
