"""Checkpoints: what a run is at a step, in a folder that any other layout of ranks reads.

    from schedir.checkpoints import load, save

    state = load(executor, "checkpoints")  # of the newest whole one, None if there is none
    ...
    save(executor, "checkpoints", step=100)

What a rank holds of a tensor are boxes of it, by the name that it has in the whole model: so who
reads may have other ranks, stages, replicas and slices than who wrote.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from schedir.checkpoints.executors import load, save
    from schedir.checkpoints.saver import Saver

__all__ = ["Saver", "load", "save"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "saver" if name == "Saver" else "executors"
    return getattr(import_module(f"schedir.checkpoints.{module}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
