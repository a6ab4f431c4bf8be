"""The page that says which schedule is the shortest for a shape: see `generate.py`.

Its tables are made of what `which_schedule.py` has simulated by `schedir recommend`: what the page
says, a reader can ask for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from docs.pages import page, table
from docs.schedules_page import run_of
from docs.which_schedule import LIMITS, ODD, RULES, SENDS, best, everywhere, known, shapes
from schedir import viz

SHOWN = (8, 32)  # of the formulas and the picture


def by_limit(send: float, *, whole: bool) -> str:
    """A row per shape, a column per limit."""
    rows = []
    for P, m in shapes():
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
    said = []
    for rule in RULES:
        asked = [w for w in everywhere() if rule.where(w)]
        held = sum(rule.holds(w) for w in asked)
        said.append(f"- {rule.said} (Holds in {held} of {len(asked)} cells.)")
    return "\n".join(said)


# ---------------------------------------------------------------- formulas


class Formula(NamedTuple):
    """What a source says of the time that a rank idles: `own`, in its own span; `most`, at most."""

    name: str
    v: int
    said: str
    source: str
    value: Callable[[int], float]  # of the ranks, at F = I = W = 1 of a whole rank
    own: bool = False
    most: bool = False


FORMULAS = [
    Formula("gpipe", 1, "(P-1)(F+B)", "arXiv 1811.06965", lambda P: 3 * (P - 1)),
    Formula("one_f_one_b", 1, "(P-1)(F+B)", "arXiv 2104.04473, section 2.2", lambda P: 3 * (P - 1)),
    Formula("interleaved", 2, "(P-1)(F+B)/v", "arXiv 2104.04473, section 2.2",
            lambda P: 3 * (P - 1) / 2),
    Formula("interleaved", 4, "(P-1)(F+B)/v", "arXiv 2104.04473, section 2.2",
            lambda P: 3 * (P - 1) / 4),
    Formula("looped_bfs", 4, "(P-1)(F+B)/v", "arXiv 2211.05953", lambda P: 3 * (P - 1) / 4),
    Formula("zb_h1", 1, "(P-1)(F+I-W)", "arXiv 2401.10241, section 2", lambda P: P - 1),
    Formula("zb_h2", 1, "(P-1)(F+I-2W)", "arXiv 2401.10241, section 2", lambda P: 0, own=True),
    Formula("zb_v", 2, "0", "arXiv 2401.10241", lambda P: 0, own=True),
    Formula("v_half", 2, "at most 1/2 (P-1)(F+B)", "arXiv 2405.15362", lambda P: 3 * (P - 1) / 2,
            most=True),
    Formula("v_min", 2, "at most 2/3 (P-1)(F+B)", "arXiv 2405.15362", lambda P: 2 * (P - 1),
            most=True),
    Formula("dualpipe", 2, "(P/2-1)(FB+B-3W)", "arXiv 2412.19437, table 2", lambda P: P - 2),
    Formula("dualpipe_v", 2, "(P-1)(FB+B-3W)/v", "github.com/deepseek-ai/DualPipe, README",
            lambda P: P - 1),
    Formula("interleaved_zb", 2, "(P-1)(F+I-W)/v", "as ZB-H1, of stages", lambda P: (P - 1) / 2),
    Formula("interleaved_zb", 4, "(P-1)(F+I-W)/v", "as ZB-H1, of stages", lambda P: (P - 1) / 4),
]  # fmt: skip


def idle(formula: Formula, P: int, m: int) -> tuple[float, float]:
    """The time that the rank with the most of it idles, to the end of all and in its own span."""
    run = run_of(formula.name, P, m, v=formula.v)
    longest = int(run.active_span.argmax())
    return round(float(run.idle.max()), 9), round(float(run.idle_in_active_span[longest]), 9)


def formulas(P: int, m: int) -> str:
    rows = []
    for formula in FORMULAS:
        name = f"`{formula.name}`" + f" x {formula.v}" * (formula.v > 1)
        whole, own = idle(formula, P, m)
        where = "own span" if formula.own else "all ranks"
        cells = (
            f"{formula.value(P):g}",
            f"{whole:g}",
            f"{own:g}",
            f"{whole / (3 * m + whole):.1%}",
        )
        rows.append([name, formula.said, formula.source, where, *cells])
    heads = ["source", "in", "its value", "simulated", "simulated, in own span", "bubble"]
    return table(["schedule", "a rank idles", *heads], rows)


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
    heads = ["recommend in 1F1B's memory", "with whole backwards", "`one_f_one_b`",
             "`interleaved` x 2",
             "`zb_h1`", "`interleaved_zb` x 2"]  # fmt: skip
    return table(["m", *heads], rows)


def blocks() -> dict[str, object]:
    """The rules, and all tables."""
    send, P, m = SENDS[1], *SHOWN
    others = [
        f"### {'Any' if not whole else 'Whole'} backwards, messages of {each:g}\n\n"
        f"{by_limit(each, whole=whole)}\n"
        for each in SENDS if each != send for whole in (False, True)
    ]  # fmt: skip
    return {
        "rules": rules(),
        "odd_ranks": ODD[0],
        "odd": odd(send),
        "send": send,
        "P": P,
        "m": m,
        "any": by_limit(send, whole=False),
        "whole": by_limit(send, whole=True),
        "formulas": formulas(P, m),
        "others": "\n".join(others),
    }


def picture() -> None:
    """Draw bubble against memory of all, each with the stages that suit it best."""
    P, m = SHOWN
    first = {cell.name: cell for cell in reversed(known()[P, m, SENDS[1]])}  # the shortest stays
    runs = []
    for cell in first.values():
        run = run_of(cell.name, P, m, v=cell.v, send=SENDS[1])
        name = cell.name + f" x {cell.v}" * (cell.v > 1)
        runs.append(replace(run, program=replace(run.program, name=name)))
    viz.save(viz.bubble_vs_memory(runs), "which-schedule.svg")


PAGES = page("how-to/choose-a-schedule", blocks, {"which-schedule.svg": picture})
