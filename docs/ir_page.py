"""Generate the page about instructions from the tables in `schedir/ir/`."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from docs.pages import define_page, format_table
from schedir import Costs, PipelineShape, compile, schedules, simulate
from schedir.analysis.progress_models import MODEL_ROWS
from schedir.ir.isa.instructions import INSTRUCTIONS, LANES, VALUES
from schedir.schedules.schedule_algebra import get_placement_mark

FORWARD, SEND, GATHER = 1.45, 0.14, 0.12  # ms of a layer's forward, a slice's send and a gather
GATHERED = {"one_f_one_b": 1, "eager_1f1b": 1, "zb_h1": 1, "zb_v": 2, "interleaved": 4}


def format_gather_table() -> str:
    """Return the table of the slowdown by gathers on the compute lane and on their own lane."""
    rows = []
    for name, v in GATHERED.items():
        shape, time = (
            PipelineShape(8, 64, v, get_placement_mark(getattr(schedules, name))[0] or "loop"),
            FORWARD * 4 / v,
        )
        crosses = [int(a != b) for a, b in pairwise(shape.first_rank_per_stage.tolist())]
        forward_times, backward_times = (
            tuple(time + GATHER * gather_count for gather_count in gather_counts)
            for gather_counts in ([0, *crosses], [*crosses, 0])
        )
        costs_without_gathers = Costs(F=time, I=time, W=time, send=SEND)
        full_backward_times = tuple(time + backward_time for backward_time in backward_times)
        spans = []
        for costs in (
            costs_without_gathers,
            replace(
                costs_without_gathers, F=forward_times, I=backward_times, B=full_backward_times
            ),
            replace(costs_without_gathers, tp_gather=GATHER),
        ):
            program = compile(
                getattr(schedules, name),
                shape,
                tp=8,
                progress_model="per_edge",
                costs=costs,
                overlap=True,
            )
            spans.append(simulate(program, costs, progress_model="per_edge").span)
        slowdowns = (f"{span / spans[0] - 1:.1%}" for span in spans[1:])
        rows.append([f"`{name}`", str(v), *slowdowns])
    return format_table(["schedule", "stages per rank", "compute lane", "own lane"], rows)


def build_blocks() -> dict[str, object]:
    """Return the tables of instructions, values, lanes and progress models."""

    instructions = [
        [
            f"{row.op.name} `{row.text}`",
            row.lane.name.lower(),
            row.scope.value or "rank",
            "same" if row.cost == row.text else row.cost or "-",
            row.doc,
        ]
        for row in INSTRUCTIONS
    ]
    values = [
        [
            f"`{value.value.name.lower()}`",
            value.phrase,
            value.scope.value or "rank",
            f"`{value.size}`",
        ]
        for value in VALUES
        if value.size
    ]
    lanes = [[lane.lane.name.lower(), lane.doc] for lane in LANES]
    waiting = [f"`{lane.lane.name.lower()}`" for lane in LANES if lane.host_action == "waits"]
    models = [[f"`{model.name}`", model.description, model.transports] for model in MODEL_ROWS]
    return {
        "table": format_table(["instruction", "lane", "once per", "cost", "meaning"], instructions),
        "values": format_table(["value", "meaning", "one per", "size"], values),
        "lanes": format_table(["lane", "contents"], lanes),
        "waiting_lanes": " and ".join(waiting),
        "models": format_table(["model", "transfers", "used by"], models),
    }


def build_gather_blocks() -> dict[str, object]:
    """Return the table of gathers, and the times that it assumes."""
    return {"gathers": format_gather_table(), "forward": FORWARD, "send": SEND, "gather": GATHER}


PAGES = define_page("reference/instructions", build_blocks) | define_page(
    "results/gathers", build_gather_blocks
)
