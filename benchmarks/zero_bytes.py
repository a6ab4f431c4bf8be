"""Bytes: what lives in a run with ZeRO and recomputation is what was predicted.

    python benchmarks/zero_bytes.py [NAME ...]

Each row is a program of a small GPT over Gloo, with AdamW, of which some keep its state on the
host.  In its second step, behind each instruction of each process, all memory of tensors that are
alive is added up: that of tensors that Python knows, and of those that operations have made since
and autograd keeps; each storage once, as large as it is now.  Messages, the batch, and numbers of
the step (losses, norms, flags) are left out.  What the prediction says is there behind the same
instruction must be the same, to the byte.
Prints a table; exits with 1 where a byte differs.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import schedir
from benchmarks.harness import parse
from schedir import Plan
from schedir.analysis.memory import Footprint, held
from schedir.ir.ops import BOUNDARY
from schedir.runtime.boundary import Boundary
from schedir.runtime.executor import Executor
from schedir.runtime.rank import Call
from schedir.runtime.sizes import sizes_of
from schedir.training import gpt
from schedir.transports.processes import Gloo
from tests.cpu.spawn import run as run_in

BATCH, CONTEXT, HIDDEN, VOCAB = 2, 8, 24, 31
_MESSAGES = {kind.name.lower() for kind in BOUNDARY} | {"handed_over"}


class Row(NamedTuple):
    """What is run."""

    schedule: Any
    plan: Plan
    zero: int
    recompute: bool
    dp: int = 2
    reduce: str = "end"
    states: str = "device"


class Measured(NamedTuple):
    """Of one process: how often it was looked, where a byte was beside the prediction (behind
    which instruction, what lived, what was predicted), and the most that lived."""

    looks: int
    beside: list[tuple[str, int, float]]
    most: int


def rows() -> dict[str, Row]:
    """All that is measured, by name."""
    found = {}
    for schedule, plan in (
        (schedir.schedules.one_f_one_b, Plan(2, 3)),
        (schedir.schedules.interleaved, Plan(2, 4, 2)),
        (schedir.schedules.looped_bfs, Plan(1, 3, 4)),
        (schedir.schedules.zb_h1, Plan(2, 4)),
    ):
        for zero in range(4):
            for again in (False, True):
                name = f"{schedule.__name__} zero {zero}" + ", recomputed" * again
                found[name] = Row(schedule, plan, zero, again)
    for zero in (0, 1, 3):
        found[f"looped_bfs zero {zero}, states on the host"] = Row(
            schedir.schedules.looped_bfs, Plan(1, 3, 4), zero, False, states="host"
        )
    for zero in (2, 3):
        found[f"interleaved zero {zero}, each turn"] = Row(
            schedir.schedules.interleaved, Plan(2, 4, 2), zero, False, 2, "turn"
        )
        found[f"one_f_one_b zero {zero}, 3 replicas"] = Row(
            schedir.schedules.one_f_one_b, Plan(2, 3), zero, False, 3
        )
    return found


class Alive(TorchDispatchMode):
    """All memory of tensors: of those there are now, and of those that operations make."""

    def __init__(self, but: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.but = {StorageWeakRef(x.untyped_storage()) for x in but}
        self.there = [ref(x) for x in gc.get_objects() if issubclass(type(x), Tensor)]
        self.made: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = _storages(tree_leaves((args, kwargs)))
        out = func(*args, **(kwargs or {}))
        # Norms are in float64, and nothing else is; a thread of Gloo may let go of them later.
        new = _storages(x for x in tree_leaves(out) if getattr(x, "dtype", 0) != torch.float64)
        self.made |= {one: size for one, size in new.items() if one not in given}
        return out

    def bytes(self, but: Iterable[object]) -> int:
        """Bytes that live, each storage once, without some."""
        self.made = {one: size for one, size in self.made.items() if not one.expired()}
        found = self.made | _storages(x for one in self.there if (x := one()) is not None)
        left = self.but | {*_storages(but)}
        return sum(size for one, size in found.items() if one not in left)


def _storages(values: Iterable[object]) -> dict[StorageWeakRef, int]:
    tensors = (x for x in values if isinstance(x, Tensor) and not x.is_sparse)
    return {StorageWeakRef(x): x.nbytes() for x in (t.untyped_storage() for t in tensors)}


class Witness:
    """Compares what lives behind each instruction of a step with what was predicted."""

    def __init__(self, executor: Executor, own: Footprint, alive: Alive) -> None:
        self.executor, self.own, self.alive = executor, own, alive
        self.found = Measured(0, [], 0)
        self.calls = executor.calls
        executor.calls = [Call(wait, partial(self.run, k, run)) for k, (wait, run) in
                          enumerate(self.calls)]  # fmt: skip

    def run(self, k: int, run: Callable[[], None]) -> None:
        """Run an instruction, and look."""
        run()
        state = self.executor.state
        joined = [*state.stream.joined.tolist(), False]
        if joined[k + 1]:  # the group is predicted as one
            return
        sent = [
            slot for kind in BOUNDARY if kind in state.slots for slot in state.slots[kind].values
        ]
        sent += [tensor for _, tensor in state.sending.values()]
        numbers = [state.norm, state.finite, state.loss_gradient, state.scale, state.verdict]
        away = [] if state.held.states is None else state.held.states.away()
        lived = self.alive.bytes(
            [*tree_leaves(sent), *tree_leaves(state.buffers), *state.losses, *numbers, *away]
        )
        at = int(np.flatnonzero(self.own.at <= k)[-1])
        parts = {name: size for name, (_, size) in self.own.fixed.items()}
        parts |= {name: float(size[at]) for name, (_, size) in self.own.kept.items()}
        right = sum(size for name, size in parts.items() if name not in _MESSAGES)
        looks, beside, most = self.found
        beside += [(str(state.stream[k]), lived, right)] if lived != right else []
        self.found = Measured(looks + 1, beside, max(most, lived))


def measure(rank: int, row: Row) -> Measured:
    """A process: what lived in its second step beside what was predicted."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    before = [x for x in gc.get_objects() if issubclass(type(x), Tensor)]
    program = schedir.compile(
        row.schedule, row.plan, dp=row.dp, zero=row.zero, reduce=row.reduce, clip=True,
        slots="fewest", recompute="all" if row.recompute else None,
        states=row.states,
    )  # fmt: skip
    transport = Gloo(program)
    cfg = gpt.GPTConfig(
        vocab=VOCAB, layers=row.plan.stages, hidden=HIDDEN, heads=2, context=CONTEXT, tied=False
    )
    count, boundary = row.plan.stages, Boundary((BATCH, CONTEXT, HIDDEN))
    m, numbers = row.plan.microbatches, torch.Generator().manual_seed(1)
    x, y = torch.randint(0, VOCAB, (2, m, BATCH, CONTEXT), generator=numbers)
    make = partial(torch.optim.AdamW, lr=1e-2)
    sizes = sizes_of(
        [gpt.build_stage(cfg, s, count) for s in range(count)], x[0], y[0], loss=gpt.loss,
        boundary=boundary, state=make, dp=row.dp, zero=row.zero, replica=transport.dp_rank,
    )  # fmt: skip
    own = program.plan.stages_of[transport.rank]
    stages = {s: gpt.build_stage(cfg, s, count) for s in own}
    executor = Executor(
        program, transport.rank, stages, transport, loss=gpt.loss, boundary=boundary,
        optimizer=make([p for stage in stages.values() for p in stage.parameters()]), max_norm=0.05,
    )  # fmt: skip
    executor.step(x, y, 1 / y.numel())
    gc.collect()
    with Alive([*before, x, y]) as alive:
        witness = Witness(executor, held(program, sizes)[transport.rank], alive)
        executor.step(x, y, 1 / y.numel())
    return witness.found


def run(row: Row) -> list[Measured]:
    """What each process of a row has measured."""
    return run_in(measure, row.plan.ranks * row.dp, row, limit=300)


def main() -> int:
    """Measure the rows whose names begin so, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="how names of programs begin")
    names = parse(parser, names=["looped_bfs zero 3, recomputed"]).names
    bad = 0
    print("| program | processes | looks | beside | most bytes, by rank and replica |")
    print("| --- | --- | --- | --- | --- |")
    for name, row in rows().items():
        if names and not any(name.startswith(one) for one in names):
            continue
        found = run(row)
        beside = [one for of in found for one in of.beside]
        worst = max((abs(lived - right) for _, lived, right in beside), default=0)
        most = ", ".join(str(of.most) for of in found)
        looks = sum(of.looks for of in found)
        print(f"| {name} | {len(found)} | {looks} | {worst:g} | {most} |", flush=True)
        if beside:
            print(*beside[:12], sep="\n", file=sys.stderr)
        bad += bool(beside)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
