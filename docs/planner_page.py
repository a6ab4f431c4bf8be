"""The pages about the planner: see `generate.py`."""

from __future__ import annotations

from docs.pages import page, table
from schedir.planner import SoftwareConstants, cluster_presets
from schedir.planner.transformer.model_presets import MODEL_PRESETS


def blocks() -> dict[str, str]:
    """The models and clusters that have a name, and the constants of software."""
    models = [
        [f"`{name}`", f"{m.params / 1e9:.4g} billion", source]
        for name, (m, source) in MODEL_PRESETS.items()
    ]
    constants = [
        [f"`{c.name}`", f"{c.value:g}", f"{c.min_value:g} to {c.max_value:g}"]
        for c in SoftwareConstants().list_constants()
    ]
    links = [
        f"[`{name}`](../../schedir/planner/hardware/clusters/{name}.toml)"
        for name in cluster_presets()
    ]
    return {
        "models": table(["name", "parameters", "source of its shape"], models),
        "clusters": ", ".join(links),
        "constants": table(["constant", "default", "bounds"], constants),
    }


PAGES = page("how-to/plan-a-cluster") | page("reference/planner", blocks)
