"""Generate the page about file formats."""

from __future__ import annotations

from dataclasses import MISSING, fields
from inspect import getdoc

from docs.pages import define_page, format_table, parse_entries
from schedir import Cluster
from schedir.ir.text_format import FORMAT_VERSION


def build_blocks() -> dict[str, object]:
    """Return the table of the fields of a cluster file, and the version of the text format."""
    about = parse_entries(str(getdoc(Cluster)))
    rows = [
        [
            f"`{f.name}`",
            about[f.name],
            "required" if f.default is MISSING else "-" if f.default is None else f"{f.default:g}",
        ]
        for f in fields(Cluster)
    ]
    return {
        "cluster": format_table(["field", "meaning", "default"], rows),
        "format": FORMAT_VERSION,
    }


PAGES = define_page("reference/file-formats", build_blocks)
