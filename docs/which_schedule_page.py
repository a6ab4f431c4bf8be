"""Generate the page with the shortest schedule for each shape.

The tables show simulations of `which_schedule.py`, which calls `schedir recommend`. So a reader can
reproduce each number with this command.
"""

from __future__ import annotations

from dataclasses import replace

from docs.pages import define_page, format_table
from docs.schedules_page import simulate_schedule
from docs.which_schedule import LIMITS, ODD, RULES, SENDS, find_best, list_shapes, read_cells
from schedir import viz

PICTURE_SHAPE = (8, 32)  # ranks and microbatches of the picture
TABLE_RANKS = (4, 16)


def format_limit_table(send: float, *, full_backward: bool) -> str:
    """Return a table with a row per shape and a column per memory limit."""
    rows = []
    for P, m in ((P, m) for P, m in list_shapes() if P in TABLE_RANKS):
        best_cells = [find_best(P, m, send, limit, full_backward=full_backward) for limit in LIMITS]
        row, previous = [str(P), str(m)], None
        for k, cell in enumerate(best_cells):
            if cell is None:
                row.append("-")
            elif k and cell == previous:
                row.append("=")
            else:
                row.append(f"{cell.text}<br>{cell.bubble:.1%}, {cell.memory:g}")
            previous = cell
        rows.append(row)
    heads = [("any" if limit is None else f"{limit:g} P").replace("1 P", "P") for limit in LIMITS]
    return format_table(["P", "m", *heads], rows)


def format_rules() -> str:
    """Return the table of the rules.  A test checks that they hold."""
    heads = ["backwards", "memory limit", "messages", "microbatches", "rule"]
    return format_table(heads, [[*rule.conditions, rule.text] for rule in RULES])


def format_odd_table(send: float) -> str:
    P, numbers = ODD
    rows = []
    for m in numbers:
        row = [str(m)]
        for full_backward in (False, True):
            cell = find_best(P, m, send, None if m < P else 1, full_backward=full_backward)
            assert cell is not None
            row.append(f"{cell.text}, {cell.bubble:.1%}")
        cell_by_name = {(cell.name, cell.v): cell for cell in read_cells()[P, m, send]}
        names = [("one_f_one_b", 1), ("interleaved", 2), ("zb_h1", 1), ("interleaved_zb", 2)]
        rows.append([*row, *(f"{cell_by_name[name_and_v].bubble:.1%}" for name_and_v in names)])
    memory = "in the memory of 1F1B"
    heads = [f"shortest {memory}", f"shortest with full backwards {memory}", "`one_f_one_b`",
             "`interleaved` x 2",
             "`zb_h1`", "`interleaved_zb` x 2"]  # fmt: skip
    return format_table(["m", *heads], rows)


def build_blocks() -> dict[str, object]:
    """Return the rules, and all tables."""
    send, P, m = SENDS[1], *PICTURE_SHAPE
    return {
        "rules": format_rules(),
        "odd_ranks": ODD[0],
        "odd": format_odd_table(send),
        "send": send,
        "P": P,
        "m": m,
        "any": format_limit_table(send, full_backward=False),
        "whole": format_limit_table(send, full_backward=True),
    }


def draw_picture() -> None:
    """Draw bubble and memory of all schedules, each with its best number of stages."""
    P, m = PICTURE_SHAPE
    # Rows are sorted by span, so the shortest row of each schedule overwrites the others.
    shortest = {cell.name: cell for cell in reversed(read_cells()[P, m, SENDS[1]])}
    runs = []
    for cell in shortest.values():
        run = simulate_schedule(cell.name, P, m, v=cell.v, send=SENDS[1])
        name = cell.name + f" x {cell.v}" * (cell.v > 1)
        runs.append(replace(run, program=replace(run.program, name=name)))
    viz.save(viz.bubble_vs_memory(runs), "which-schedule.svg")


PAGES = define_page("how-to/choose-a-schedule", build_blocks, {"which-schedule.svg": draw_picture})
