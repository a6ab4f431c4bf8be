"""Planner here: all plans of a small GPT on this machine, predicted beside measured.

    python benchmarks/planner_here.py
    python benchmarks/planner_here.py --cluster here.toml --steps 2 --microbatch 4

Measures the machine as `schedir plan --measure` does, unless told of a `--cluster`; prices all
plans for as many processes, each simulated as its program; and trains all of these, as
`schedir train` would with the configuration that the planner writes.  A step begins as all
processes leave a barrier, and ends with the last of them; of `--steps` behind two that warm up
the median counts.  "Worked" is the processor time of all processes in a step, over the processors:
no step can be shorter, and one that is much longer had processors that idled, or were taken by
others.  Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import line, parse
from schedir import load_cluster, planner
from schedir.ir.cluster import Cluster
from schedir.planner.choice import Priced
from schedir.planner.plan import plan
from schedir.planner.runnable import config as written
from schedir.runtime.boundary import Boundary
from schedir.runtime.executor import Executor
from schedir.training import gpt
from schedir.training.config_file import read
from schedir.training.gpt_config import GPTConfig
from schedir.training.measure import measure
from schedir.training.optimizer import optimizer_of
from schedir.transports.local_processes import run
from schedir.transports.registry import choose

MODEL = planner.Model(layers=8, hidden=256, heads=8, vocab=256, sequence=128)
BATCH, PROCESSES, WARM = 16, 4, 2
SCHEDULES = ("one_f_one_b", "interleaved", "zb_h1")
GOAL = 0.10


class Ran(NamedTuple):
    """What a plan took: the median step, and its spread, over all; processor seconds of a step."""

    step: float
    spread: float
    cpu: float


def train(texts: list[str], processes: int, steps: int) -> list[Ran]:
    """Train with one configuration after the other, each in processes of its own; what it took."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([one.__module__])
    found = []
    began = time.perf_counter()
    for number, text in enumerate(texts):
        ranks: list[Ran] = run(one, processes, text, steps, context=context, limit=600)
        found.append(together(ranks))
        left = (time.perf_counter() - began) / (number + 1) * (len(texts) - number - 1)
        print(f"\r{number + 1} of {len(texts)} trained, {left:.0f} s left ", end="",
              file=sys.stderr, flush=True)  # fmt: skip
    return found


def one(_: int, text: str, steps: int) -> Ran:
    """Train some steps as one rank of a configuration, as `training.trainer` does."""
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(text)
        file.flush()
        config = read(file.name)
    torch.set_num_threads(config.train.threads)
    program, size, context = config.request.program, config.data.microbatch_size, MODEL.sequence
    transport = choose(config.train.transport, "cpu", program)(
        program, config.train.timeout, message=4 * size * context * MODEL.hidden // program.tp
    )
    tp, division = transport.tp_group, config.pipeline.division
    assert isinstance(config.model, GPTConfig), "the planner writes no other"
    stages = {
        s: gpt.build_stage(config.model, s, program.plan.stages, tp=tp, division=division)
        for s in program.plan.stages_of[transport.rank]
    }
    parameters = [p for stage in stages.values() for p in stage.parameters()]
    executor = Executor(
        program, transport.rank, stages, transport,
        loss=partial(gpt.loss, tp=tp), boundary=Boundary((size, context, MODEL.hidden)),
        optimizer=optimizer_of(parameters, config.train), max_norm=config.train.clip, record=False,
    )  # fmt: skip
    draw = torch.Generator().manual_seed(transport.dp_rank)
    shape = (2, program.plan.microbatches, size, context)
    took, cpu = [], []
    for _ in range(WARM + steps):
        x, y = torch.randint(MODEL.vocab, shape, generator=draw)
        dist.barrier()
        began, worked = time.perf_counter(), time.process_time()
        executor.step(x, y, 1 / (BATCH * context))
        dist.barrier()
        took.append(time.perf_counter() - began)
        cpu.append(time.process_time() - worked)
    own = took[WARM:]
    return Ran(statistics.median(own), max(own) / min(own) - 1, statistics.median(cpu[WARM:]))


def plans(cluster: Cluster, microbatch: int | None, zero: int) -> list[Priced]:
    """All plans that the trainer runs, the fastest by prediction first."""
    return plan(
        MODEL, cluster, BATCH, top=10**6, schedules=SCHEDULES, exact=True,
        b=(1, 2, 4) if microbatch is None else microbatch, v=(1, 2), zero=zero,
        recompute=("none", "full"), sequence_parallel=False, attention="flash",
    )  # fmt: skip


def named(one: Priced) -> list[object]:
    """A plan in a few cells."""
    again = "yes" if one.recompute == "full" else ""
    return [one.p, one.t, one.d, one.b, f"{one.schedule} {one.v}", again]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cluster", metavar="FILE", help="a Cluster file, and no measurement")
    parser.add_argument("--steps", type=int, default=4, metavar="N")
    parser.add_argument("--microbatch", type=int, metavar="B", help="sequences of one, not 1, 2, 4")
    parser.add_argument("--zero", type=int, default=0, metavar="LEVEL")
    parser.add_argument("--processes", type=int, default=PROCESSES, metavar="N")
    options = parse(parser, processes=2, steps=1, microbatch=4)
    began = time.perf_counter()
    if options.cluster:
        cluster = load_cluster(options.cluster)
    else:
        taken = measure(options.processes, quick=options.smoke, progress=True)
        cluster = taken.cluster
        print("\n".join([*taken.table, *taken.warnings, ""]))
    print(f"{cluster}\n")
    all_of = plans(cluster, options.microbatch, options.zero)[: 2 if options.smoke else None]
    texts = [written(MODEL, one) for one in all_of]
    ran = train(texts, options.processes, options.steps)
    print(file=sys.stderr)
    report(all_of, ran, cluster.processors or options.processes)
    print(f"\n{len(ran)} plans in {time.perf_counter() - began:.0f} s")


def together(ranks: list[Ran]) -> Ran:
    """What all ranks took: the longest, and what they worked in all."""
    longest = max(ranks)
    return longest._replace(cpu=sum(one.cpu for one in ranks))


def report(all_of: list[Priced], ran: list[Ran], processors: int) -> None:
    """The table, and what it comes to."""
    line("p", "t", "d", "b", "schedule, stages of a rank", "run again", "predicted, ms",
         "measured, ms", "off", "spread", "worked, ms")  # fmt: skip
    line(*["---:"] * 4, *["---"] * 2, *["---:"] * 5)
    for one, took in zip(all_of, ran, strict=True):
        line(*named(one), f"{1e3 * one.step:.0f}", f"{1e3 * took.step:.0f}",
             f"{one.step / took.step - 1:+.0%}", f"{took.spread:.0%}",
             f"{1e3 * took.cpu / processors:.0f}")  # fmt: skip
    errors = [abs(one.step / took.step - 1) for one, took in zip(all_of, ran, strict=True)]
    steps = [took.step for took in ran]
    mean = statistics.mean(errors)
    place = sorted(steps).index(steps[0]) + 1
    print(f"\nmean error {mean:.1%} (goal: {GOAL:.0%}), median {statistics.median(errors):.1%}, "
          f"largest {max(errors):.1%}; the chosen plan is number {place} of {len(steps)} measured, "
          f"{steps[0] / min(steps) - 1:.1%} slower than the best (goal: among two)")  # fmt: skip


if __name__ == "__main__":
    main()
