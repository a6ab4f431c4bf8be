"""Generate the page of all settings of a training run."""

from __future__ import annotations

import re

from docs.pages import define_page, format_cell_text, format_table
from schedir.training.config.settings_table import (
    Setting,
    format_heading,
    list_settings,
    split_docstring,
)
from schedir.transports.registry import TRANSPORTS


def shorten_type(accepted: str) -> str:
    """Return the values that a setting accepts, in fewer words than an error message needs."""
    short = accepted.replace("|", "\\|")
    short = re.sub(
        r"an integer of at least (\d+) and below (\d+)",
        lambda bounds: f"integer, {bounds[1]} to {int(bounds[2]) - 1}",
        short,
    )
    for phrase, replacement in (
        ("an integer", "integer"),
        ("a number", "number"),
        ("a string", "string"),
        ("a list", "list"),
    ):
        short = short.replace(phrase, replacement)
    return re.sub(r" of at least (\S+)( and below)?", r" >= \1\2", short)


def format_default(default: str) -> str:
    """Return a default as code if it is one TOML value."""
    return f"`{default}`" if default and ", or" not in default else default or "-"


def capitalize(text: str) -> str:
    """Return a text with its first letter in upper case."""
    return text[0].upper() + text[1:]


def format_section(
    section: str, about: str, settings: list[Setting], shared: list[list[str]]
) -> str:
    """Return a section of the page: its prose, and a table of its settings.

    A section about another kind of model omits the rows in `shared`, which are those of [model].
    """
    prose, meanings = split_docstring(about)
    meanings |= {"kind": "The kind of the model."} if section == "model" else {}
    unknown = {*meanings} - {setting.name for setting in settings}
    undocumented = [setting.name for setting in settings if not setting.meaning]
    assert not unknown, f"[{section}]: {unknown} are documented, but no settings"
    assert not undocumented, f"[{section}]: {undocumented} have no meaning"
    rows = format_rows(settings)
    if section != "model" and section.startswith("model"):
        same = [row[0] for row in rows if row in shared]
        rows = [row for row in rows if row not in shared]
        prose += f"\n\nThese settings are the same as in [[model]](#model): {', '.join(same)}."
    settings_table = format_table(["setting", "value", "default", "meaning"], rows)
    return f"## {format_heading(section)}\n\n{prose}\n\n{settings_table}"


def format_rows(settings: list[Setting]) -> list[list[str]]:
    """Return the rows of the table of settings."""
    return [
        [f"`{setting.name}`", shorten_type(setting.accepted), format_default(setting.default),
         capitalize(format_cell_text(setting.meaning))]
        for setting in settings
    ]  # fmt: skip


def build_blocks() -> dict[str, str]:
    """Return the sections with their settings, and the transports."""
    shared = format_rows(list_settings()["model"][1])
    sections = [format_section(name, *section, shared) for name, section in list_settings().items()]
    transports = [
        [row.device, f"`{row.name}`", row.doc, f"`{row.progress_model}`"]
        for row in TRANSPORTS.values()
    ]
    return {
        "sections": "\n\n".join(sections),
        "transports": format_table(
            ["device", "transport", "how messages move", "progress model"], transports
        ),
    }


PAGES = define_page("reference/configuration", build_blocks)
