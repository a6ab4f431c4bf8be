"""Find and open the text and token files of a run."""

from __future__ import annotations

import glob
import os
import platform
import sysconfig
import tempfile
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np

from schedir.data.token_windows import Tokens
from schedir.errors import UsageError
from schedir.retired_names import RETIRED_HINTS


def load_tokens(source: str | Path | Sequence[str | Path] | None = None) -> Tokens:
    """Return a stream of tokens, memory-mapped if the stream is in one file.

    Args:
        source: A `.bin` of uint16 tokens, as nanoGPT writes, or paths and patterns of text files,
            in which each byte is a token. The default is the Python sources of this interpreter's
            standard library, 10 to 30 million bytes.

    Returns:
        The tokens, uint8 or uint16. Shape (n,).

    Raises:
        UsageError: A file is missing or cannot be read, or a `.bin` has an odd size.
    """
    if source is None:
        return load_python_sources(Path(sysconfig.get_path("stdlib")))
    paths = find_files(source)
    bin_paths = [path for path in paths if path.suffix == ".bin"]
    if not bin_paths:
        texts = [_memory_map(path, "u1") for path in paths]
        return texts[0] if len(texts) == 1 else np.concatenate(texts)
    if len(paths) > 1:
        other_path = next(path for path in paths if path != bin_paths[0])
        raise UsageError(
            f"a .bin of tokens must be the only file: {bin_paths[0]} is given with {other_path}"
        )
    return _memory_map(bin_paths[0], "<u2")


def load_python_sources(root: Path) -> Tokens:
    """Return the bytes of the `.py` files in a directory, without installed packages.

    The files are joined in the order of their paths. The first call writes the joined files to a
    file in the cache directory ($XDG_CACHE_HOME/schedir), named after `root` and the Python
    version. Later calls read that file.

    Args:
        root: The directory.

    Raises:
        UsageError: The cache cannot be written or read.
    """
    root_digest = sha256(str(root).encode()).hexdigest()[:8]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "schedir"
    cache = folder / f"python-{platform.python_version()}-{root_digest}.txt"
    if not cache.exists():
        _join_files(find_python_files(root), cache)
    return _memory_map(cache, "u1")


def find_python_files(root: Path) -> list[Path]:
    """Return the `.py` files in a directory, without installed packages, sorted by path.

    Args:
        root: The directory, searched recursively.
    """
    package_folders = {"site-packages", "dist-packages"}
    return sorted(
        p for p in root.rglob("*.py") if not package_folders & {*p.relative_to(root).parts}
    )


def find_files(sources: str | Path | Sequence[str | Path]) -> list[Path]:
    """Return the files that paths and patterns refer to, in the order of `sources`.

    The files of one pattern are sorted.

    Args:
        sources: Paths, or patterns of `glob`.

    Raises:
        UsageError: A path or pattern matches no file, or matches a `.jsonl` file.
    """
    paths: list[Path] = []
    for source in [sources] if isinstance(sources, str | Path) else sources:
        name = str(source)
        try:
            names = [name] if Path(name).exists() else glob.glob(name, recursive=True)
        except OSError as error:  # a name that is too long
            raise UsageError(f"cannot read {name:.200}: {error.strerror}") from None
        files = sorted(path for path in map(Path, names) if path.is_file())
        if Path(name).is_dir():
            raise UsageError(
                f"cannot read {name}: it is a folder", hint=f"{Path(name, '*')} reads its files"
            )
        if not files:
            raise UsageError(
                f"cannot read {name:.200}: no file has this name or matches it",
                hint=""
                if Path(name).is_absolute()
                else "a relative path starts at the current folder",
            )
        if json_files := [path for path in files if path.suffix == ".jsonl"]:
            raise UsageError(
                f"{json_files[0]} has JSON lines instead of plain text",
                hint=RETIRED_HINTS["source = .jsonl"],
                fields=["source"],
            )
        paths += files
    if not paths:
        raise UsageError("the list of files is empty")
    return paths


def _memory_map(path: Path, dtype: str) -> Tokens:
    try:
        size, width = path.stat().st_size, np.dtype(dtype).itemsize
        if size % width:
            raise UsageError(
                f"{path} is cut off: its {size} bytes are not a multiple of {width}, the bytes of "
                "a token"
            )
        # An empty file cannot be mapped.
        return np.memmap(path, dtype, "r") if size else np.zeros(0, dtype)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error


def _join_files(paths: Iterable[Path], target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Several ranks may do this at the same time. Each writes and renames a separate file, and
        # all of these files have the same contents.
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            joined_path = Path(folder, "whole")
            with joined_path.open("wb") as file:
                for path in paths:
                    file.write(path.read_bytes())
            os.replace(joined_path, target)
    except OSError as error:
        raise UsageError(
            f"cannot write {target}: {error}", hint="set XDG_CACHE_HOME to a writable folder"
        ) from error
