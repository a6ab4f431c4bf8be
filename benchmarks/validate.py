"""Validate: the time from a step to the next, with steps that wait for the norm and with others.

    python benchmarks/validate.py
    python benchmarks/validate.py zb_h2 --slow 1.5 --steps 60

Four processes run tiny stages over Gloo, and each F, I, W and B then sleeps for as long as it
costs: so processes are beside each other on any machine, as if each had a device of its own.
`--slow` is how much longer those of the last stage take.  Steps of both programs come in turns,
`--steps` of each in `--rounds` rounds; a round ends when its weights are settled.  `predicted` is
`schedir.predict.period`, on hosts that block.  With `--clipped k`, of every k-th step the loss is
so large that its gradients are clipped: its update is made again, with the step behind it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import nn

from benchmarks.harness import head, line, parse
from benchmarks.paired_steps import on_ranks, squares
from schedir import Costs, Plan, compile, schedules, simulate
from schedir.ir.ops import COMPUTE, WHOLES
from schedir.ir.program import Program
from schedir.predict.period import period
from schedir.runtime import split_linears
from schedir.runtime.executor import Executor
from schedir.runtime.rank import Call
from schedir.transports.processes import Gloo

RANKS, MICROBATCHES, UNIT, WIDTH = 4, 12, 20e-3, 4  # seconds of an F, I or W
WHEN = ("before", "after")


def program_of(name: str, validate: str) -> Program:
    """A schedule of four ranks, with the stages and the placement that it is for."""
    vee = name in ("zb_v", "v_half", "v_min")
    plan = Plan(RANKS, MICROBATCHES, placement="vee" if vee else "loop")
    schedule = getattr(schedules, name)
    return compile(schedule, plan, model="edge", blocks=True, clip=True, validate=validate)


def costs_of(program: Program, slow: float) -> Costs:
    """In units of an F of any stage but the last."""
    each = (1.0,) * (program.plan.stages - 1) + (slow,)
    return Costs(F=each, I=each, W=each)


def asleep(call: Call, seconds: float) -> Call:
    """The same, which then sleeps."""

    def run_and_sleep() -> None:
        call.run()
        time.sleep(seconds)

    return call._replace(run=run_and_sleep)


def trained(
    rank: int, name: str, slow: float, steps: int, rounds: int, clipped: int
) -> list[list[float]]:
    """Seconds from a step to the next, of each round and program."""
    found: list[list[float]] = []
    executors = []
    for validate in WHEN:
        program = program_of(name, validate)
        transport = Gloo(program)
        torch.manual_seed(0)
        modules = [nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(program.plan.stages)]
        for module in modules:
            split_linears(module)
        own = {s: modules[s] for s in program.plan.stages_of[transport.rank]}
        parameters = [p for module in own.values() for p in module.parameters()]
        executor = Executor(
            program, transport.rank, own, transport, loss=squares, boundary=(2, WIDTH),
            optimizer=torch.optim.AdamW(parameters, lr=1e-4), max_norm=1e3, record=False,
        )  # fmt: skip
        for k, i in enumerate(executor.state.stream):
            if i.op in COMPUTE:
                parts = 2 if i.op in WHOLES else 1
                factor = slow if i.stage == program.plan.stages - 1 else 1.0
                executor.calls[k] = asleep(executor.calls[k], UNIT * parts * factor)
        executors.append(executor)
    x = torch.ones(MICROBATCHES, 2, WIDTH)
    for _ in range(rounds):
        for executor in executors:
            began = time.perf_counter()
            for step in range(steps):
                large = clipped and step % clipped == clipped - 1
                executor.step(x, x, 1e6 if large else 1.0)
            executor.settle()
            found.append([(time.perf_counter() - began) / steps])
    return found


def main() -> None:
    """Print a row for each schedule."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", default=["one_f_one_b", "zb_h1", "zb_h2", "zb_v"])
    parser.add_argument("--slow", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clipped", type=int, default=0)
    args = parse(parser, names=["zb_h2"], steps=2, rounds=1, clipped=2)
    head("schedule", "span", "own span", "predicted", "measured", "shorter: predicted", "measured")
    for name in args.names:
        programs = [program_of(name, validate) for validate in WHEN]
        costs = costs_of(programs[0], args.slow)
        one = simulate(programs[0], costs, model="edge", blocks=True)
        told = [period(program, costs, model="edge", blocks=True) for program in programs]
        given = name, args.slow, args.steps, args.rounds, args.clipped
        ranks = on_ranks(trained, RANKS, *given, limit=900)
        rounds = [max(rank[k][0] for rank in ranks) / UNIT for k in range(2 * args.rounds)]
        seen = [statistics.median(rounds[when::2]) for when in range(2)]
        pairs = zip(rounds[::2], rounds[1::2], strict=True)
        gain = statistics.median(1 - after / before for before, after in pairs)
        line(
            f"`{name}`", f"{one.span:.1f}", f"{one.own_span.max():.1f}",
            f"{told[0]:.1f}, {told[1]:.1f}", f"{seen[0]:.1f}, {seen[1]:.1f}",
            f"{1 - told[1] / told[0]:.1%}", f"{gain:.1%}",
        )  # fmt: skip


if __name__ == "__main__":
    main()
