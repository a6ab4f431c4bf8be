"""The page that says which schedule is the shortest for a shape: see `generate.py`.

Its tables are from the simulations of `which_schedule.py`, which calls `schedir recommend`. So a
reader can reproduce each number with this command.
"""

from __future__ import annotations

from dataclasses import replace

from docs.pages import page, table
from docs.schedules_page import run_of
from docs.which_schedule import LIMITS, ODD, RULES, SENDS, best, known, shapes
from schedir import viz

SHOWN = (8, 32)  # ranks and microbatches of the picture
TABLE_RANKS = (4, 16)


def by_limit(send: float, *, whole: bool) -> str:
    """Return a table with a row per shape and a column per memory limit."""
    rows = []
    for P, m in ((P, m) for P, m in shapes() if P in TABLE_RANKS):
        found = [best(P, m, send, limit, whole=whole) for limit in LIMITS]
        row, before = [str(P), str(m)], None
        for k, cell in enumerate(found):
            if cell is None:
                row.append("-")
            elif k and cell == before:
                row.append("=")
            else:
                row.append(f"{cell.text}<br>{cell.bubble:.1%}, {cell.memory:g}")
            before = cell
        rows.append(row)
    heads = [("any" if limit is None else f"{limit:g} P").replace("1 P", "P") for limit in LIMITS]
    return table(["P", "m", *heads], rows)


def rules() -> str:
    """The rules as a table.  A test checks that they hold."""
    heads = ["backwards", "memory limit", "messages", "microbatches", "rule"]
    return table(heads, [[*rule.conditions, rule.text] for rule in RULES])


def odd(send: float) -> str:
    P, numbers = ODD
    rows = []
    for m in numbers:
        row = [str(m)]
        for whole in (False, True):
            cell = best(P, m, send, None if m < P else 1, whole=whole)
            assert cell is not None
            row.append(f"{cell.text}, {cell.bubble:.1%}")
        own = {(cell.name, cell.v): cell for cell in known()[P, m, send]}
        names = [("one_f_one_b", 1), ("interleaved", 2), ("zb_h1", 1), ("interleaved_zb", 2)]
        rows.append([*row, *(f"{own[each].bubble:.1%}" for each in names)])
    heads = ["best in 1F1B's memory", "with full backwards", "`one_f_one_b`",
             "`interleaved` x 2",
             "`zb_h1`", "`interleaved_zb` x 2"]  # fmt: skip
    return table(["m", *heads], rows)


def blocks() -> dict[str, object]:
    """The rules, and all tables."""
    send, P, m = SENDS[1], *SHOWN
    return {
        "rules": rules(),
        "odd_ranks": ODD[0],
        "odd": odd(send),
        "send": send,
        "P": P,
        "m": m,
        "any": by_limit(send, whole=False),
        "whole": by_limit(send, whole=True),
    }


def picture() -> None:
    """Draw the bubble against the memory of all schedules, each with its best number of stages."""
    P, m = SHOWN
    # Rows are sorted by span, so the shortest row of each schedule overwrites the others.
    first = {cell.name: cell for cell in reversed(known()[P, m, SENDS[1]])}
    runs = []
    for cell in first.values():
        run = run_of(cell.name, P, m, v=cell.v, send=SENDS[1])
        name = cell.name + f" x {cell.v}" * (cell.v > 1)
        runs.append(replace(run, program=replace(run.program, name=name)))
    viz.save(viz.bubble_vs_memory(runs), "which-schedule.svg")


PAGES = page("how-to/choose-a-schedule", blocks, {"which-schedule.svg": picture})
