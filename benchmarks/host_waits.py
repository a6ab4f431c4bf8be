"""Host waits: what makes the host wait for the GPU, counted."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest import mock

import torch

WARNED: Final = "called a synchronizing CUDA operation"  # by torch, of what waits unasked
ASKED: Final = (torch.cuda, torch.cuda.Event, torch.cuda.Stream)  # to synchronize


@contextmanager
def host_waits() -> Iterator[list[str]]:
    """Notes whatever makes the host wait for the GPU within this: by torch's own word, or because
    somebody asks for it."""
    found: list[str] = []
    with ExitStack() as stack:
        for of in ASKED:
            noted = _noted(getattr(of, "synchronize"), found)  # noqa: B009
            stack.enter_context(mock.patch.object(of, "synchronize", noted))
        seen = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
            found += [str(w.message) for w in seen if WARNED in str(w.message)]


def _noted(wait: Callable[..., object], found: list[str]) -> Callable[..., object]:
    # A function, as the method is: it is bound to what it is asked of.
    def noted(*given: Any, **named: Any) -> object:
        found.append(f"{wait.__qualname__} is called")
        return wait(*given, **named)

    return noted
