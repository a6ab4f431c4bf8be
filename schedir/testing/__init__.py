"""Hypothesis strategies, and assertions about schedules and gradients.

- `assert_schedule` tests a schedule on many shapes.  A wrong schedule raises AssertionError with
  the smallest shape on which it fails.
- `assert_same_gradients` compares a pipeline step of any library with a plain loop over the same
  model.
- The strategies draw shapes, drafts, programs, and options of `compile`.

The strategies and `assert_schedule` need hypothesis.  torch is imported only when gradients are
compared.

Example:
    >>> from schedir import B, F
    >>> from schedir.testing import assert_schedule
    >>> def mine(rank, ranks, microbatches):
    ...     warmup = min(ranks - 1 - rank, microbatches)
    ...     return warmup * F + (microbatches - warmup) * (F + B) + warmup * B
    >>> assert_schedule(mine)
    >>> def impatient(rank, ranks, microbatches):
    ...     warmup = min(rank, microbatches)
    ...     return warmup * F + (microbatches - warmup) * (F + B) + warmup * B
    >>> assert_schedule(impatient)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    AssertionError: impatient is refused on PipelineShape(...) under progress model 'per_edge'
    DeadlockError: impatient: 2 ranks wait for each other; stopped after 2 of 8 instructions
      rank 0 #1   B 0.0  needs B 1.0, #2 on rank 1; rank 1 is at #1
      rank 1 #1   F 1.1  needs F 0.1, #2 on rank 0; rank 0 is at #1
      ...
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from schedir.extras import require_package
from schedir.retired_names import make_attribute_error

if TYPE_CHECKING:
    from schedir.testing.gradient_assertion import assert_same_gradients
    from schedir.testing.schedule_assertion import assert_schedule
    from schedir.testing.strategies import (
        compile_options,
        compute_programs,
        programs,
        random_compute_program,
        shapes,
        shapes_for,
        tied_weights,
    )

_MODULE_BY_NAME = {
    "assert_same_gradients": "gradient_assertion",
    "assert_schedule": "schedule_assertion",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise make_attribute_error(__name__, name)
    require_package(
        "torch" if name == "assert_same_gradients" else "hypothesis", f"schedir.testing.{name}"
    )
    return getattr(
        import_module(f"schedir.testing.{_MODULE_BY_NAME.get(name, 'strategies')}"), name
    )


__all__ = [
    "assert_same_gradients",
    "assert_schedule",
    "compile_options",
    "compute_programs",
    "programs",
    "random_compute_program",
    "shapes",
    "shapes_for",
    "tied_weights",
]
