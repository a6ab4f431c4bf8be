"""Dump files: which files are dumps of a flight recorder, read as plain values within limits."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from schedir.dumps.plain_pickle import loads
from schedir.errors import TraceError, UsageError
from schedir.io.files import begin_of, named, opened

MOST_BYTES: Final = {"pickle": 2**27, "json": 2**25}  # of a file; JSON makes more of a byte
_FIRST: Final = 2**12  # bytes in which a dump begins
MOST_ENTRIES: Final = 2**20
MOST_FILES: Final = 2**14
RANK: Final = re.compile(r"(\d{1,6})(?:\.(?:json|pickle|pkl|dump|bin))?$")


def paths_of(places: Iterable[str]) -> tuple[list[str], list[str]]:
    """The files in files, folders and patterns, and those of folders that are passed over.

    Of a folder those files count whose names end in a number, as torch names them.  Raises
    UsageError where there is none.
    """
    paths: dict[str, None] = {}
    passed: list[str] = []

    def in_folder(folder: Path) -> list[Path]:
        files = sorted(file for file in folder.iterdir() if file.is_file())
        dumps = [file for file in files if RANK.search(file.name)]
        passed.extend(str(file) for file in files if file not in {*dumps})
        if not dumps:
            raise UsageError(
                f"{folder} has no file whose name ends in a rank, such as nccl_trace_rank_0"
            )
        return dumps

    for place in places:
        if not (own := named(place, in_folder)):
            raise UsageError(f"there is no file {place}")
        paths |= dict.fromkeys(map(str, own))
    if len(paths) > MOST_FILES:
        raise UsageError(f"{len(paths)} files are too many: at most {MOST_FILES} ranks are read")
    return [*paths], passed


def read(path: str) -> dict[str, Any]:
    """What is in a file, of which so much is sure: it is of a version that is known, with entries.

    Raises TraceError for a file that is no dump, UsageError for one that cannot be read.
    """
    with opened(path) as file:
        data = begin_of(file, _FIRST)
        form = "pickle" if data[:1] == b"\x80" else "json"
        most = MOST_BYTES[form]
        if form == "json" and data.lstrip()[:1] != b"{":
            raise TraceError(
                "this is no dump of a flight recorder, which is JSON or a pickle"
                if data
                else "the file is empty",
                program=path,
            )
        large = os.fstat(file.fileno()).st_size > most
        if large or len(data := data + begin_of(file, most + 1 - len(data))) > most:
            raise TraceError(
                f"a dump of more than {most >> 20} MiB of {form} is not read",
                program=path,
                hint="a smaller TORCH_FR_BUFFER_SIZE keeps fewer entries",
            )
    raw = loads(data, path) if form == "pickle" else _json(data, path)
    if not isinstance(raw, dict) or not isinstance(raw.get("version"), str):
        raise TraceError("this is no dump of a flight recorder: it has no version", program=path)
    if raw["version"].partition(".")[0] != "2":
        raise TraceError(
            f"the dump is of version {plain(raw['version'])}, and 2 is what is read",
            program=path,
        )
    # Left out where it would be empty.
    entries = raw.setdefault("entries", [])
    if not isinstance(entries, list | tuple) or not all(isinstance(e, dict) for e in entries):
        raise TraceError("the entries of the dump are no list of entries", program=path)
    if len(entries) > MOST_ENTRIES:
        raise TraceError(f"the dump has more than {MOST_ENTRIES} entries", program=path)
    return raw


def _json(data: bytes, path: str) -> Any:
    try:
        return json.loads(data)
    except RecursionError:
        raise TraceError("the JSON is nested too deeply for a dump", program=path) from None
    except ValueError as error:  # of bytes that are no UTF-8, and of thousands of digits, too
        at = getattr(error, "pos", getattr(error, "start", 0))
        raise TraceError(
            f"the JSON is cut off or damaged at byte {at} of {len(data)}", program=path
        ) from None


def plain(text: object) -> str:
    """A name out of a file, fit for a terminal; of what is no text nothing is looked at."""
    return _printable(text[:200] if isinstance(text, str) else f"<{type(text).__name__}>")


@lru_cache(2**12)
def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)
