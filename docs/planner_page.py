"""The pages about the planner: see `generate.py`."""

from __future__ import annotations

from dataclasses import fields
from inspect import getdoc

from docs.pages import entries, one_line, page, table
from schedir import Cluster
from schedir.planner import SoftwareConstants, cluster_preset, cluster_presets
from schedir.planner.plan_simplicity import measure_complexity
from schedir.planner.transformer.model_presets import MODEL_PRESETS

SHAPE = ("layers", "hidden", "heads", "vocab", "sequence")  # columns of the table of models


def blocks() -> dict[str, str]:
    """The models and clusters that have a name, and the constants of software."""
    models = [
        [
            f"`{name}`",
            f"{model.params / 1e9:.4g} billion",
            *(f"{getattr(model, shape)}" for shape in SHAPE),
            source,
        ]
        for name, (model, source) in MODEL_PRESETS.items()
    ]
    meanings = entries(str(getdoc(SoftwareConstants)))
    constants = [
        [f"`{c.name}`", meanings[c.name], f"{c.value:g}", f"{c.min_value:g} to {c.max_value:g}"]
        for c in SoftwareConstants().list_constants()
    ]
    presets = {name: cluster_preset(name) for name in cluster_presets()}
    clusters = [
        [f"`{f.name}`", *(number(getattr(preset, f.name)) for preset in presets.values())]
        for f in fields(Cluster)
        if any(getattr(preset, f.name) is not None for preset in presets.values())
    ]
    links = [f"[`{name}`](../../schedir/planner/hardware/clusters/{name}.toml)" for name in presets]
    return {
        "simplest": one_line(str(getdoc(measure_complexity)).split("\n\n")[1]),
        "models": table(["name", "parameters", *SHAPE, "source"], models),
        "clusters": table(["field", *links], clusters),
        "constants": table(["constant", "meaning", "default", "bounds"], constants),
    }


def number(value: float | None) -> str:
    """Return a number as text of a table cell."""
    return "-" if value is None else f"{value:g}"


PAGES = page("how-to/plan-a-cluster") | page("reference/planner", blocks)
