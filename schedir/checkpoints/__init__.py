"""Save checkpoints, and load them into any other layout of ranks.

    from schedir.checkpoints import load, save

    state = load(executor, "checkpoints")  # the newest complete checkpoint, or None
    ...
    save(executor, "checkpoints", step=100)

Each process saves slices of tensors under the names that the tensors have in the full model. So a
run with other ranks, stages, replicas or tensor-parallel sizes can load these slices.
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
