"""The page about instructions, from the tables in `schedir/ir/`: see `generate.py`."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from docs.pages import page, table
from schedir import Costs, PipelineShape, compile, schedules, simulate, to_text
from schedir.analysis.progress_models import MODEL_ROWS, MODELS
from schedir.ir.isa.instructions import INSTRUCTIONS, LANES, VALUES, Value
from schedir.ir.text_format import FORMAT_VERSION
from schedir.schedules import one_f_one_b
from schedir.schedules.schedule_algebra import get_placement_mark

FORWARD, SEND, GATHER = 1.45, 0.14, 0.12  # ms: of a layer, of a slice, of a boundary
GATHERED = {"one_f_one_b": 1, "eager_1f1b": 1, "zb_h1": 1, "zb_v": 2, "interleaved": 4}


def gathers() -> str:
    """What it costs to gather on the compute lane, as part of F, B and I, and on its own."""
    rows = []
    for name, v in GATHERED.items():
        shape, time = (
            PipelineShape(8, 64, v, get_placement_mark(getattr(schedules, name))[0] or "loop"),
            FORWARD * 4 / v,
        )
        crosses = [int(a != b) for a, b in pairwise(shape.first_rank_per_stage.tolist())]
        ahead, back = (
            tuple(time + GATHER * one for one in some) for some in ([0, *crosses], [*crosses, 0])
        )
        free = Costs(F=time, I=time, W=time, send=SEND)
        whole = tuple(time + one for one in back)
        spans = []
        for costs in (
            free,
            replace(free, F=ahead, I=back, B=whole),
            replace(free, tp_gather=GATHER),
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
        more = (f"{span / spans[0] - 1:.1%}" for span in spans[1:])
        rows.append([f"`{name}`", str(v), *more])
    return table(["schedule", "stages per rank", "on the compute lane", "on its own"], rows)


WAITS = "waits for what it needs, and starts it"
HOSTS = {"runs": "runs it", "waits": WAITS, "starts": "starts it"}


def blocks() -> dict[str, object]:
    """The tables of instructions, values, lanes and progress models."""

    def tokens(some: tuple[Value, ...]) -> str:
        return ", ".join(t.name.lower() for t in some) or "-"

    rows, values = [], []
    for row in INSTRUCTIONS:
        said = [row.op.name, f"`{row.text}`", row.lane.name.lower(), row.scope.value or "rank"]
        rows.append([*said, *map(tokens, (row.needs, row.gives, row.frees)), row.cost or "-"])
    for value in VALUES:
        said = [value.value.name, value.phrase, value.scope.value or "rank"]
        values.append([*said, value.producer_rule.value, value.size or "-"])
    head = ["name", "text", "lane", "once per", "needs", "gives", "frees", "priced by"]
    lanes = [[lane.lane.name.lower(), lane.doc, HOSTS[lane.host_action]] for lane in LANES]
    rules = [[f"`{model.name}`", model.description, model.transports] for model in MODEL_ROWS]
    return {
        "table": table(head, rows),
        "lines": "\n".join(f"- **{row.op.name}**: {row.doc}" for row in INSTRUCTIONS),
        "gathers": gathers(),
        "forward": FORWARD,
        "send": SEND,
        "gather": GATHER,
        "values": table(["value", "meaning", "one per", "produced by", "bytes"], values),
        "lanes": table(["lane", "has", "a host that blocks"], lanes),
        "rules": table(["model", "transfers", "used by"], rules),
        "models": ", ".join(f"`{m}`" for m in MODELS),
        "program": to_text(compile(one_f_one_b, PipelineShape(2, 8))),
        "format": FORMAT_VERSION,
    }


PAGES = page("reference/instructions", blocks)
