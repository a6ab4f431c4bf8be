"""The page of all settings of a training run: see `generate.py`."""

from __future__ import annotations

from docs.pages import ROOT, page, table
from schedir.training.config.settings_table import format_heading, list_settings
from schedir.transports.registry import TRANSPORTS


def blocks() -> dict[str, str]:
    """Every section with its settings, and the transports."""
    sections = []
    for section, (about, own) in list_settings().items():
        rows = [[f"`{name}`", takes, f"`{usual}`" if usual else "-"] for name, takes, usual in own]
        shown = table(["setting", "takes", "default"], rows)
        sections.append(f"## {format_heading(section)}\n\n{about}\n\n{shown}")
    transports = [
        [row.device, f"`{row.name}`", row.doc, row.progress_model] for row in TRANSPORTS.values()
    ]
    return {
        "demo": (ROOT / "examples" / "demo.toml").read_text().strip(),
        "sections": "\n\n".join(sections),
        "transports": table(["device", "transport", "messages travel", "model"], transports),
    }


PAGES = page("reference/configuration", blocks)
