"""Bits: a run of every level of ZeRO leaves the same parameters, moments and losses.

    python benchmarks/zero_bits.py [NAME ...]

Each case is a GPT of tied embeddings, whose gradients are clipped, and five steps of AdamW over
Gloo, once for each level; levels 1 to 3 are compared with plain data parallelism, to the bit.
Prints a table; exits with 1 where a bit differs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import schedir
from benchmarks.harness import parse
from schedir import Plan
from schedir.runtime.boundary import Boundary
from schedir.runtime.executor import Executor
from schedir.runtime.precision import MainOptimizer, float32_gradients
from schedir.training import gpt
from schedir.transports.processes import Gloo
from tests.cpu.spawn import run as run_in

STEPS, BATCH, CONTEXT, HIDDEN, VOCAB = 5, 2, 8, 24, 31
Found = dict[tuple[int, int, str, str], list[tuple[int, torch.Tensor]]]


class Case(NamedTuple):
    """What is run: a schedule's plan, replicas, tensor-parallel ranks, and the precision."""

    schedule: Any
    plan: Plan
    dp: int = 2
    tp: int = 1
    half: bool = False
    options: Any = ()
    folder: str | None = None  # of what is on the disk

    @property
    def processes(self) -> int:
        """How many it takes."""
        return self.plan.ranks * self.dp * self.tp


def cases() -> dict[str, Case]:
    """All that is compared, by name."""
    found = {}
    for schedule, plan in (
        (schedir.schedules.one_f_one_b, Plan(2, 3)),
        (schedir.schedules.interleaved, Plan(2, 4, 2)),
        (schedir.schedules.looped_bfs, Plan(2, 3, 2)),
        (schedir.schedules.zb_h1, Plan(2, 4)),
        (schedir.schedules.dualpipe, Plan(2, 4, placement="mirror")),
    ):
        for dp, tp, half in (
            (2, 1, False),
            (3, 1, False),
            (2, 1, True),
            (3, 1, True),
            (2, 2, False),
        ):
            name = f"{schedule.__name__} dp{dp}" + " tp2" * (tp == 2) + " bf16" * half
            found[name] = Case(schedule, plan, dp, tp, half)
    return found


def stages_of(case: Case, own: Any, tp: Any) -> dict[int, nn.Module]:
    """Own stages of a GPT whose tokens' embedding is tied."""
    cfg = gpt.GPTConfig(
        vocab=VOCAB,
        layers=case.plan.stages,
        hidden=HIDDEN,
        heads=2,
        context=CONTEXT,
        tied=case.plan.stages > 1,
    )
    stages: dict[int, nn.Module] = {}
    for s in own:
        stages[s] = gpt.build_stage(cfg, s, case.plan.stages, tp=tp)
        if case.half:
            float32_gradients(stages[s].bfloat16())
    return stages


def train(rank: int, case: Case, zero: int) -> tuple[list[bytes], Found]:
    """A process: the losses and norms of a run, and what it has of each parameter and moment."""
    torch.manual_seed(0)
    more = {k: v for k, v in dict(case.options).items() if k != "active" or zero == 3}
    program = schedir.compile(
        case.schedule, case.plan, dp=case.dp, tp=case.tp, zero=zero,
        **{"clip": True, "tied": case.plan.stages > 1} | more,
    )  # fmt: skip
    transport = Gloo(program)
    tp = transport.tp_group
    stages = stages_of(case, program.plan.stages_of[transport.rank], tp)
    parameters = [p for stage in stages.values() for p in stage.parameters()]
    optimizer: Any
    if case.half:
        optimizer = MainOptimizer(parameters, lambda main: torch.optim.AdamW(main, 1e-2))
    else:
        optimizer = torch.optim.AdamW(parameters, 1e-2)
    executor = Executor(
        program,
        transport.rank,
        stages,
        transport,
        loss=lambda y, target: gpt.loss(y, target, tp=tp),
        boundary=Boundary((BATCH, CONTEXT, HIDDEN), torch.bfloat16 if case.half else torch.float32),
        optimizer=optimizer,
        max_norm=0.05 if program.clip else None,
        folder=case.folder,
    )
    m, numbers = case.plan.microbatches, torch.Generator().manual_seed(1)
    told: list[bytes] = []
    for _ in range(STEPS):
        x, y = torch.randint(0, VOCAB, (2, m * case.dp, BATCH, CONTEXT), generator=numbers)
        own = slice(transport.dp_rank * m, (transport.dp_rank + 1) * m)
        total = executor.step(x[own], y[own], 1 / y.numel())
        told += [t.numpy().tobytes() for t in (total, executor.norm) if t is not None]
    return told, kept(executor, optimizer, transport)


def kept(executor: Executor, optimizer: Any, transport: Any) -> Found:
    """What a process has of each parameter, its gradient and moments: from which number on."""
    found: Found = {}
    main = dict(
        zip(getattr(optimizer, "parameters", ()), getattr(optimizer, "main", ()), strict=True)
    )
    state = getattr(optimizer, "inner", optimizer).state
    for s, stage in executor.stages.items():
        begins: dict[nn.Parameter, int] = {}
        for bucket in stage.gradients.buckets if stage.weights is not None else ():
            ranges = bucket.ranges(transport.dp_rank)
            begins |= {p: r[0] for p, r in zip(bucket.parameters, ranges, strict=True)}
        for name, p in stage.module.named_parameters():
            what = {
                "p": p.detach(),
                "grad": p.grad,
                "main": main.get(p),
                **state.get(main.get(p, p), {}),
            }
            for kind, value in what.items():
                if isinstance(value, torch.Tensor) and value.dim() and value.numel():
                    key = (s, transport.rank * transport.tp + transport.tp_rank, name, kind)
                    flat = value.detach().reshape(-1).clone()
                    found.setdefault(key, []).append((begins.get(p, 0), flat))
    return found


def whole(all_found: list[tuple[list[bytes], Found]]) -> dict[Any, torch.Tensor]:
    """Everything that processes have, by name, whole."""
    pieces: dict[Any, list[tuple[int, torch.Tensor]]] = {}
    for _, found in all_found:
        for key, own in found.items():
            pieces.setdefault(key, []).extend(own)
    result = {}
    for key, own in pieces.items():
        size = max(begin + t.numel() for begin, t in own)
        result[key] = torch.full((size,), torch.nan, dtype=own[0][1].dtype)
        for begin, t in own:
            there = result[key][begin : begin + t.numel()]
            assert torch.equal(there[~there.isnan()], t[~there.isnan()]), key  # replicas are alike
            there.copy_(t)
    return result


def run(case: Case, zero: int) -> list[tuple[list[bytes], Found]]:
    """What each process tells of a run."""
    return run_in(train, case.processes, case, zero, limit=300)


def differing(plain: Any, *others: Any) -> list[str]:
    """What of other runs, as `run` tells of them, is not as in a plain one; nothing, if all is."""
    right, found = whole(plain), []
    for zero, cut in enumerate(others, 1):
        if [told for told, _ in cut] != [told for told, _ in plain]:
            found.append(f"zero {zero}: losses or norms")
        got = whole(cut)
        found += [f"zero {zero}: only in one: {key}" for key in sorted(got.keys() ^ right.keys())]
        found += [
            f"zero {zero}: {key}"
            for key in sorted(got.keys() & right.keys())
            if not torch.equal(got[key], right[key])
        ]
    return found


def main() -> int:
    """Compare the cases whose names begin so, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="how names of cases begin")
    names = parse(parser, names=["interleaved dp2 bf16"]).names
    bad = 0
    print("| case | processes | zero 1, 2, 3 against 0 |\n| --- | --- | --- |")
    for name, case in cases().items():
        if names and not any(name.startswith(one) for one in names):
            continue
        found = differing(*(run(case, zero) for zero in range(4)))
        bad += bool(found)
        print(f"| {name} | {case.processes} | {'; '.join(found) or 'the same bits'} |", flush=True)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
