"""Search beside published schedules, beside its own bound, and how long it takes.

    python benchmarks/search.py                         # all tables
    python benchmarks/search.py table5 [--seconds 6]    # arXiv 2401.10241, table 5 from table 9
    python benchmarks/search.py uneven [--seconds 4]    # stages that differ, over the bound
    python benchmarks/search.py time [--seconds 10]     # with numba; without it if it is missing,
    NUMBA_DISABLE_JIT=1 python benchmarks/search.py time  # or if this says so

Each row is printed as it is found, as a line of a table.  Seconds are of processor time unless they
are said to be of a clock, which is right only on a quiet machine.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter, process_time

sys.path.insert(0, str(Path(__file__).parents[1]))

import schedir
from benchmarks.harness import head, line, parse
from schedir import Costs, Plan
from schedir.analysis import compiled
from schedir.errors import MemoryLimitError, ProgramError, UsageError
from schedir.schedules import built_in
from tests.published import PRINTED, rows

DRAWN = 5  # times that costs are drawn
SHAPES = [(4, 16), (4, 64), (8, 24), (8, 64), (16, 48), (16, 128)]


def table5(seconds: float, smoke: bool) -> None:
    """Bubble rates of own spans, as the paper counts them, in as much memory as it says."""
    head("model", "p", "m", "limit", "paper", "found", "bound", "", "stopped", "s")
    for row in rows()[:1] if smoke else rows():
        for limit, column in ((1, "rate_ZB_1p"), (2, "rate_ZB_2p")):
            began = process_time()
            found = schedir.search(
                row.plan, row.costs, row.sizes, limit * row.plan.ranks,
                objective="own", seconds=seconds,
            )  # fmt: skip
            took = process_time() - began
            paper, rate = row.rates[column], row.rate(found.span)
            beside = "better" if rate < paper - PRINTED / 2 else "equal"
            beside = "worse" if rate > paper + PRINTED / 2 else beside
            line(
                row.model, row.plan.ranks, row.plan.microbatches, f"{limit}p", f"{paper:.2%}",
                f"{rate:.3%}", f"{row.rate(found.bound):.3%}", beside, found.stopped, f"{took:.1f}",
            )  # fmt: skip


def families(ranks: int) -> Iterator[tuple[str, Costs]]:
    """Costs of stages that differ."""
    last = (1.0,) * (ranks - 1) + (1.5,)
    yield "last x 1.5", Costs(F=last, I=last, W=last)
    for seed in range(DRAWN):
        rng = random.Random(seed)
        F, I, W = (tuple(rng.uniform(0.7, 1.3) for _ in range(ranks)) for _ in range(3))
        yield f"0.7 to 1.3, {seed}", Costs(F=F, I=I, W=W)


def best_of_zoo(plan: Plan, costs: Costs, room: int) -> float:
    """The shortest span of the built-in schedules that hold no more than so many."""
    spans = []
    for schedule in built_in().values():
        try:
            run = schedir.simulate(schedir.compile(schedule, plan, costs=costs), costs)
        except (MemoryLimitError, ProgramError):  # it is for other plans
            continue
        if run.program.trains and run.program.plan == plan and run.peak_in_flight.max() <= room:
            spans.append(run.span)
    return min(spans)


def uneven(seconds: float, smoke: bool) -> None:
    """How far the best of the zoo, and what is found, are over the bound."""
    head("p x m", "in flight", "costs", "best of the zoo", "found", "stopped", "s")
    over, zoo = [], []
    for p, m in SHAPES[:1] if smoke else SHAPES:
        for room in (p, p * 3 // 2):
            for name, costs in families(p):
                plan = Plan(p, m)
                began = process_time()
                found = schedir.search(plan, costs, in_flight=room, seconds=seconds)
                took = process_time() - began
                over.append(found.gap)
                zoo.append(best_of_zoo(plan, costs, room) / found.bound - 1)
                line(
                    f"{p} x {m}", room, name, f"{zoo[-1]:.2%}", f"{found.gap:.2%}",
                    found.stopped, f"{took:.1f}",
                )  # fmt: skip
    for name, gaps in (("zoo", zoo), ("found", over)):
        print(f"{name}: {sum(gaps) / len(gaps):.2%} in the mean, {max(gaps):.2%} at worst")


def time(seconds: float, smoke: bool) -> None:
    """How long a bound takes, a proof, a schedule within 1 % of the bound, and a first one."""
    try:
        compiled.load()
    except UsageError:
        print("numba: no\n")
    else:
        print("numba: yes\n")
    head("what", "p x m", "processor s", "clock s", "over the bound")
    paper = Costs(F=18.522, I=18.086, W=9.337, send=0.601)
    uneven_ = dict(families(16))["0.7 to 1.3, 0"]
    for p, m in ((8, 24),) if smoke else ((8, 24), (16, 128), (32, 256)):
        times = []
        for _ in range(3):
            began = process_time()
            schedir.bound(Plan(p, m), paper, in_flight=p)
            times.append(process_time() - began)
        line("bound, the best of three", f"{p} x {m}", f"{min(times):.4f}", "", "")
    searches = (
        ("search, even", 8, 24, paper),
        ("search, 0.7 to 1.3", 16, 128, uneven_),
        ("search, even", 32, 256, paper),
        ("search, 0.7 to 1.3", 32, 256, dict(families(32))["0.7 to 1.3, 0"]),
    )
    for what, p, m, costs in searches[:1] if smoke else searches:
        began, clock = process_time(), perf_counter()
        seen: list[tuple[float, float]] = []
        found = schedir.search(
            Plan(p, m), costs, in_flight=p, seconds=seconds,
            report=lambda step, bound, seen=seen, began=began: seen.append(  # type: ignore[misc]
                (process_time() - began, step.span / bound - 1)
            ),
        )  # fmt: skip
        took, shown = process_time() - began, perf_counter() - clock
        line(f"{what}: {found.stopped}", f"{p} x {m}", f"{took:.2f}", f"{shown:.2f}",
             f"{found.gap:.2%}")  # fmt: skip
        if seen:  # else the time was over before the first schedule
            line("its first schedule", f"{p} x {m}", f"{seen[0][0]:.2f}", "", f"{seen[0][1]:.2%}")
        close = [each for each in seen if each[1] <= 0.01]
        if close:
            line("within 1 %", f"{p} x {m}", f"{close[0][0]:.2f}", "", f"{close[0][1]:.2%}")
    plan, costs = Plan(16, 64), dict(families(16))["0.7 to 1.3, 0"]
    for asked in (0.1,) if smoke else (1.0, 3.0):
        clock = perf_counter()
        schedir.search(plan, costs, in_flight=16, seconds=asked)
        line(f"--seconds {asked:g}", "16 x 64", "", f"{perf_counter() - clock:.2f}", "")


TABLES: dict[str, tuple[Callable[[float, bool], None], float]] = {
    "table5": (table5, 6.0), "uneven": (uneven, 4.0), "time": (time, 10.0),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("table", nargs="?", default="all", choices=("all", *TABLES))
    parser.add_argument("--seconds", type=float)
    options = parse(parser, seconds=0.1)
    for name in TABLES if options.table == "all" else [options.table]:
        table, usual = TABLES[name]
        table(usual if options.seconds is None else options.seconds, options.smoke)


if __name__ == "__main__":
    main()
