"""Documents: the texts of files, one per file, or one per line of a `.jsonl`, and their digest."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Final

from schedir.data.cache import digest, home
from schedir.errors import UsageError

LONGEST: Final = 2**28  # bytes of a line
_PART: Final = 2**22
_YOUNG: Final = 2 * 10**9  # nanoseconds in which a file may change and keep its time


def documents(path: Path) -> Iterator[bytes]:
    """The documents of a file that are not empty: of a `.jsonl` the "text" of each line, as
    Megatron-LM's and others' preprocessing takes it; of any other file all of it.

    Raises UsageError for a file that cannot be read, and for a line that has no text, by number.
    """
    try:
        if path.suffix != ".jsonl":
            if text := path.read_bytes():
                yield text
            return
        with path.open("rb") as lines:
            number = 0
            while line := lines.readline(LONGEST + 1):
                number += 1
                if line.strip() and (text := _text(line, path, number)):
                    yield text
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", fields=["source"]) from None


def _text(line: bytes, path: Path, number: int) -> bytes:
    def refuse(what: str) -> UsageError:
        return UsageError(
            f"{path}, line {number} {what}",
            hint='a line is such as {"text": "a document"}',
            fields=["source"],
        )

    if len(line) > LONGEST:
        raise refuse(f"has more than {LONGEST:,} bytes")
    try:
        said = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise refuse(f"is not UTF-8 text: see byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        why = "it nests too deep" if isinstance(error, RecursionError) else str(error)
        raise refuse(f"is not JSON: {why}") from None
    text = said.get("text") if isinstance(said, dict) else None
    if not isinstance(text, str):
        raise refuse('is no object with a "text" that is a string')
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise refuse(f"has half of a surrogate pair, at character {error.start}") from None


def digest_of(paths: Sequence[Path]) -> str:
    """A digest of the contents of files, in their order.

    Whole files are read, but not again while no file's size, times and number have changed: what
    was found is kept in the cache folder.
    """
    try:
        stats = [(path, path.stat()) for path in paths]
        kinds = [(path.suffix == ".jsonl", stat.st_size) for path, stat in stats]
        stamps = [
            (str(p.resolve()), s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for p, s in stats
        ]
        kept = home() / f"digest-{digest(kinds, stamps)}"
        if kept.exists():
            return kept.read_text()
        whole = blake2b(repr(kinds).encode(), digest_size=16)
        for path in paths:
            with path.open("rb") as file:
                while part := file.read(_PART):
                    whole.update(part)
        newest = max((max(s.st_mtime_ns, s.st_ctime_ns) for _, s in stats), default=0)
        if newest + _YOUNG < time.time_ns():
            temporary = kept.with_name(f".{kept.name}.{os.getpid()}")
            temporary.write_text(whole.hexdigest())
            os.replace(temporary, kept)
    except OSError as error:
        raise UsageError(
            f"cannot use {error.filename}: {error.strerror}", fields=["source"]
        ) from None
    return whole.hexdigest()
