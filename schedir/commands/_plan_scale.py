"""Plans over numbers of GPUs: the same batch on more of them, and a batch that grows with them."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from schedir.commands._plan_asked import Asked, asked_of, planned, with_gpus
from schedir.commands._plans import AT_LAST, facts, seconds
from schedir.errors import ProgramError, UsageError
from schedir.io.terminal import as_json, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from schedir.planner import Priced

_MEANT = {"strong": "the same batch", "weak": "a batch that grows with the GPUs"}


def told(args: argparse.Namespace) -> str:
    """A table for each way to grow; the picture is written."""
    several = (
        (args.output, "-o"), (args.tradeoff, "--tradeoff"), (args.search, "--search"),
        (args.gpus is not None, "--gpus"),
    )  # fmt: skip
    for option, name in several:
        if option:
            raise UsageError(f"{name} is of one number of GPUs, and --scale says several")
    asked, refused = asked_of(args), list[str]()
    found = {way: _plans(asked, args.scale, way, refused) for way in _MEANT}
    if args.picture is not None:
        from schedir.viz import plan_scaling, save

        save(plan_scaling(found["strong"], found["weak"]), args.picture)
    if args.json:
        return as_json({way: [facts(plan) for plan in plans] for way, plans in found.items()}
                       | {"refused": refused})  # fmt: skip
    lines = [f"{way}: {_MEANT[way]}\n{_table(plans)}" for way, plans in found.items() if plans]
    lines += [f"not {line}\n" for line in refused]
    return "".join(lines) + (f"wrote {args.picture}\n" if args.picture is not None else "")


def _plans(asked: Asked, scale: Sequence[int], way: str, refused: list[str]) -> list[Priced]:
    """The best plan for each number of GPUs; of those that have none it is `refused` why."""
    found: list[Priced] = []
    most = max(scale)
    first: ProgramError | None = None
    for gpus in sorted({*scale}):
        batch = asked.batch if way == "strong" else asked.batch * gpus / most
        if batch != int(batch):
            refused.append(f"{gpus:,} GPUs, {way}: {batch:.2f} sequences are no batch")
            continue
        here = replace(asked, cluster=with_gpus(asked.cluster, gpus), batch=int(batch))
        try:
            found += planned(here, 1)
        except ProgramError as error:
            first = first or error
            refused.append(f"{gpus:,} GPUs, {way}: {error.fact}")
    if not found and first is not None:
        raise first
    return found


def _table(plans: Sequence[Priced]) -> str:
    first = plans[0]
    last = [(name, field) for name, field, usual in AT_LAST
            if any(getattr(plan, field) != usual for plan in plans)]  # fmt: skip
    return table(
        ["GPUs", "batch", "pp", "tp", "dp", "v", "b", "schedule", "recompute", "ZeRO",
         *(name for name, _ in last), "step",
         "TFLOP/s", "MFU", "of the first"],
        [
            [
                f"{plan.gpus:,}", f"{plan.batch:,}", str(plan.p), str(plan.t), str(plan.d),
                str(plan.v), str(plan.b), plan.schedule, plan.recompute, str(plan.zero),
                *(getattr(plan, field) for _, field in last),
                seconds(plan.step), f"{plan.flops / 1e12:.1f}", f"{plan.mfu:.1%}",
                f"{plan.flops / first.flops:.0%}",
            ]
            for plan in plans
        ],
    )  # fmt: skip
