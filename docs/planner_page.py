"""Generate the pages about the planner."""

from __future__ import annotations

from dataclasses import fields
from inspect import getdoc

from docs.pages import define_page, format_cell_text, format_table, parse_entries
from schedir import Cluster
from schedir.planner import (
    SoftwareConstants,
    cluster_preset,
    cluster_presets,
    stack_preset,
    stack_presets,
)
from schedir.planner.calibration import CONSTANTS
from schedir.planner.hardware.step_time_errors import MEASURED_ERRORS
from schedir.planner.plan_simplicity import measure_complexity
from schedir.planner.transformer.model_presets import MODEL_PRESETS

SHAPE = ("layers", "hidden", "heads", "vocab", "sequence")  # columns of the table of models


def build_blocks() -> dict[str, str]:
    """Return the tables of models, clusters, stacks and software constants."""
    models = [
        [
            f"`{name}`",
            f"{model.params / 1e9:.4g} billion",
            *(f"{getattr(model, shape)}" for shape in SHAPE),
            source,
        ]
        for name, (model, source) in MODEL_PRESETS.items()
    ]
    meanings = parse_entries(str(getdoc(SoftwareConstants)))
    constants = [
        [f"`{c.name}`", meanings[c.name], f"{c.value:g}", f"{c.min_value:g} to {c.max_value:g}"]
        for c in SoftwareConstants().list_constants()
    ]
    default_constants = SoftwareConstants()
    stacks = []
    for name in stack_presets():
        stack = stack_preset(name)
        changed_constants = [
            f"`{c.name}` {c.value:g}"
            for c in stack.constants.list_constants()
            if c.value != getattr(default_constants, c.name)
        ]
        states = "/".join(f"{size:g}" for size in stack.state_bytes)
        cells = [
            f"`{name}`",
            ", ".join(changed_constants) or "-",
            states,
            stack.division,
            stack.rank_order,
        ]
        stacks.append([*cells, stack.source])
    presets = {name: cluster_preset(name) for name in cluster_presets()}
    clusters = [
        [f"`{f.name}`", *(format_number(getattr(preset, f.name)) for preset in presets.values())]
        for f in fields(Cluster)
        if any(getattr(preset, f.name) != f.default for preset in presets.values())
    ]
    links = [f"[`{name}`](../../schedir/planner/hardware/clusters/{name}.toml)" for name in presets]
    return {
        "simplest": format_cell_text(str(getdoc(measure_complexity)).split("\n\n")[1]),
        "models": format_table(["name", "parameters", *SHAPE, "source"], models),
        "clusters": format_table(["field", *links], clusters),
        "stacks": format_table(
            ["name", "constants", "bytes of states", "division", "rank order", "source"], stacks
        ),
        "intervals": format_table(
            ["software and machine", "steps", "5 %", "95 %", "resolution"],
            [
                [
                    name,
                    errors.source,
                    *(f"{100 * share:+.1f} %" for share in errors[:2]),
                    f"{100 * errors.resolution:.1f} %",
                ]
                for name, (_, _, errors) in MEASURED_ERRORS.items()
            ],
        ),
        "calibrated": format_table(
            ["constant", "meaning", "bounds", "deviation of the prior"],
            [
                [
                    f"`{name}`",
                    row.meaning,
                    f"{row.min_value:g} to {row.max_value:g}",
                    f"{row.prior_deviation:.0%}",
                ]
                for name, row in CONSTANTS.items()
            ],
        ),
        "constants": format_table(["constant", "meaning", "default", "bounds"], constants),
    }


def format_number(value: float | None) -> str:
    """Return a number as text of a table cell."""
    return "-" if value is None else f"{value:g}"


PAGES = define_page("how-to/plan-a-cluster") | define_page("reference/planner", build_blocks)
