"""The page about file formats: see `generate.py`."""

from __future__ import annotations

from dataclasses import MISSING, fields
from inspect import getdoc

from docs.pages import entries, page, table
from schedir import Cluster
from schedir.ir.text_format import FORMAT_VERSION


def blocks() -> dict[str, object]:
    """The fields of a cluster file, and the number of the text format."""
    about = entries(str(getdoc(Cluster)))
    rows = [
        [
            f"`{f.name}`",
            about[f.name],
            "required" if f.default is MISSING else "-" if f.default is None else f"{f.default:g}",
        ]
        for f in fields(Cluster)
    ]
    return {
        "cluster": table(["field", "meaning", "default"], rows),
        "format": FORMAT_VERSION,
    }


PAGES = page("reference/file-formats", blocks)
