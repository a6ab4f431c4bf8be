"""Save and load checkpoints, which any other layout of ranks can load.

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

from schedir.extras import require_package

if TYPE_CHECKING:
    from schedir.checkpoints.async_saver import Saver
    from schedir.checkpoints.load_checkpoint import load
    from schedir.checkpoints.save_checkpoint import save

__all__ = ["Saver", "load", "save"]
_EXPORT_MODULES = {"Saver": "async_saver", "load": "load_checkpoint", "save": "save_checkpoint"}


def __getattr__(name: str) -> Any:
    if name not in _EXPORT_MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require_package("torch", f"schedir.checkpoints.{name}")
    return getattr(import_module(f"schedir.checkpoints.{_EXPORT_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
