"""Token streams on disk, and the batches that every rank draws from them by itself."""

from __future__ import annotations

import glob
import hashlib
import os
import platform
import sysconfig
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from schedir.errors import UsageError

_PART, _PARTS = 2**16, 2**12  # bytes, and how many parts of as many make a digest

Tokens = NDArray[np.unsignedinteger[Any]]  # uint8 where bytes are the tokens, or uint16


def load(source: str | Path | Sequence[str | Path] | None = None) -> Tokens:
    """A stream of tokens, memory-mapped where one file holds it.

    `source` is None for the Python source of this interpreter's standard library (some 10 to 30
    million bytes, always at hand); a `.bin` of uint16 tokens, as nanoGPT writes; or text files,
    given as paths and globs, of which each byte is a token. Raises UsageError for what is missing
    or cannot be read, and for a `.bin` of odd size.
    """
    if source is None:
        return python_sources(Path(sysconfig.get_path("stdlib")))
    paths = _find([source] if isinstance(source, str | Path) else source)
    bins = [path for path in paths if path.suffix == ".bin"]
    if not bins:
        texts = [_map(path, "u1") for path in paths]
        return texts[0] if len(texts) == 1 else np.concatenate(texts)
    if len(paths) > 1:
        other = next(path for path in paths if path != bins[0])
        raise UsageError(f"a .bin of tokens comes alone: {bins[0]} does not go with {other}")
    return _map(bins[0], "<u2")


def python_sources(root: Path) -> Tokens:
    """The `.py` files under `root` without installed packages, joined in order of their paths.

    Joined once, into a file in the cache folder ($XDG_CACHE_HOME/schedir) named after `root` and
    the Python version, and read from there afterwards. Raises UsageError if that cannot be written.
    """
    place = hashlib.sha256(str(root).encode()).hexdigest()[:8]
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cache = home / "schedir" / f"python-{platform.python_version()}-{place}.txt"
    if not cache.exists():
        installed = {"site-packages", "dist-packages"}
        paths = (p for p in root.rglob("*.py") if not installed & {*p.relative_to(root).parts})
        _join(sorted(paths), cache)
    return _map(cache, "u1")


class Batches:
    """Random windows of a token stream: what each step trains on, without communication.

    `tokens` is the stream, `context` the window's length, `batch` how many windows a step has.
    Raises UsageError if the stream is shorter than context + 1 or a number is out of range.
    """

    def __init__(
        self, tokens: Tokens, context: int, batch: int, seed: int = 0, *, vocab: int = 256
    ) -> None:
        self.where = getattr(tokens, "filename", None) or "the corpus"
        for name, value, least in (("context", context, 1), ("batch", batch, 1), ("seed", seed, 0)):
            if value < least:
                raise UsageError(f"{name} must be {least} or more, not {value}")
        if len(tokens) < context + 1:
            raise UsageError(
                f"{self.where} has {len(tokens)} tokens, fewer than context + 1 = {context + 1}"
            )
        self.tokens = np.asarray(tokens)
        self.context, self.size, self.seed, self.vocab = context, batch, seed, vocab

    @property
    def told(self) -> str:
        """How much there is to read, and a digest of it: of all bytes up to 256 MiB, of as many at
        even distances of more."""
        data, digest = self.tokens.view(np.uint8), hashlib.blake2b(digest_size=8)
        parts = -(-len(data) // _PART)
        for k in sorted({k * parts // min(parts, _PARTS) for k in range(min(parts, _PARTS))}):
            digest.update(data[k * _PART : (k + 1) * _PART].tobytes())
        return f"{len(self.tokens)} tokens of {self.tokens.dtype} ({digest.hexdigest()})"

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a step, each int64 (batch, context): a function of (seed, step).

        Raises UsageError if a token read is not below `vocab`.
        """
        if step < 0:
            raise UsageError(f"step must be 0 or more, not {step}")
        random = np.random.default_rng((self.seed, step))
        starts = random.integers(len(self.tokens) - self.context, size=self.size)
        at = starts[:, None] + np.arange(self.context + 1)
        windows = self.tokens[at].astype(np.int64)
        if windows.max() >= self.vocab:
            wrong = np.unravel_index(windows.argmax(), windows.shape)
            raise UsageError(
                f"{self.where}: token {windows[wrong]} at position {at[wrong]} is not below the "
                f"vocabulary size {self.vocab}"
            )
        both = torch.from_numpy(windows)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()


def _find(sources: Iterable[str | Path]) -> list[Path]:
    """The files that paths and globs name, in that order; those of one glob sorted."""
    found: list[Path] = []
    for source in sources:
        names = [str(source)] if Path(source).exists() else glob.glob(str(source), recursive=True)
        files = sorted(path for path in map(Path, names) if path.is_file())
        if not files:
            raise UsageError(f"there is no file {source}, and as a pattern it matches none")
        found += files
    if not found:
        raise UsageError("no files given")
    return found


def _map(path: Path, dtype: str) -> Tokens:
    try:
        size, width = path.stat().st_size, np.dtype(dtype).itemsize
        if size % width:
            raise UsageError(
                f"{path} is cut off: its tokens have {width} bytes each, but it has {size} bytes"
            )
        # An empty file cannot be mapped.
        return np.memmap(path, dtype, "r") if size else np.zeros(0, dtype)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error


def _join(paths: Iterable[Path], target: Path) -> None:
    """Write the files one after the other to `target`, which appears whole or not at all."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Several ranks may do this at once: each renames a file of its own, all the same.
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            whole = Path(folder, "whole")
            with whole.open("wb") as out:
                for path in paths:
                    out.write(path.read_bytes())
            os.replace(whole, target)
    except OSError as error:
        raise UsageError(
            f"cannot write {target}: {error}", hint="set XDG_CACHE_HOME to a folder to write in"
        ) from error
