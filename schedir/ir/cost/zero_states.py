"""Compute the bytes of weights, gradients and optimizer state per replica by ZeRO level
(1910.02054).
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from schedir.errors import UsageError, describe
from schedir.ir.cost.per_stage_values import to_per_stage

# From which level on each replica has its part only: none, P_os, P_os+g, P_os+g+p.
SHARDED_FROM_LEVEL: Final = {"optimizer": 1, "grads": 2, "params": 3}
ZERO_LEVEL_COUNT: Final = 1 + max(SHARDED_FROM_LEVEL.values())
# What memory is called that has parts of them, and whole ones beside the parts.
SHARDED_LABELS: Final = {
    "params": "weights in parts", "grads": "gradient in parts", "optimizer": "optimizer in parts",
}  # fmt: skip
UNSHARDED_LABELS: Final = {"params": "whole weights", "grads": "whole gradient"}


def is_sharded(size_name: str, zero: int) -> bool:
    """Whether at a level replicas have parts of what a field of Sizes tells."""
    return zero >= SHARDED_FROM_LEVEL.get(size_name, ZERO_LEVEL_COUNT)


class ModelStates(NamedTuple):
    """Bytes that one replica holds of each; floats, or arrays of the shape of what was given."""

    params: Any
    grads: Any
    optimizer: Any

    @property
    def total(self) -> Any:
        """All together."""
        return self.params + self.grads + self.optimizer


def zero_model_states(
    params: ArrayLike,
    grads: ArrayLike,
    optimizer: ArrayLike,
    zero: int,
    dp: int,
    *,
    parameter_counts: ArrayLike | None = None,
) -> ModelStates:
    """What level `zero` (0 to 3) of ZeRO leaves of a model's states on each of `dp` replicas, in
    bytes.

    `params`, `grads` and `optimizer` are the bytes of whole ones: a number each, or one for each
    stage or bucket.  What a level cuts has a part of 1/dp: the optimizer's state from level 1 on,
    gradients from 2, parameters from 3.  With 2, 2 and 12 bytes for each of Psi parameters that is
    4 Psi + 12 Psi/dp, 2 Psi + 14 Psi/dp and 16 Psi/dp (arXiv 1910.02054, sections 5.1 to 5.3).

    `parameter_counts` is of how many parameters each is made.  They are then cut into parts of as
    many each, of which the last are padded: a part has ceil(numbers / dp) of them.  Without, parts
    are fractions, as in the paper.  What is whole is never padded.

    Raises UsageError for another level, for less than one replica, and for what is negative or not
    finite.

    >>> from schedir import zero_model_states
    >>> [round(zero_model_states(15, 15, 90, zero, 64).total, 2) for zero in range(4)]  # GB; 7.5B
    [120.0, 31.41, 16.64, 1.88]
    >>> zero_model_states(20, 20, 120, 3, 4, parameter_counts=10)  # 3 parameters in each part
    ModelStates(params=6.0, grads=6.0, optimizer=36.0)
    """
    if _as_integer(zero, 0) is None or zero >= ZERO_LEVEL_COUNT:
        raise UsageError(
            f"zero is a level of ZeRO, from 0 to {ZERO_LEVEL_COUNT - 1}, not {describe(zero)}",
            fields=["zero"],
        )
    if _as_integer(dp, 1) is None:
        raise UsageError(f"dp is a number of replicas, not {describe(dp)}", fields=["dp"])
    parts: NDArray[np.float64] | float = float(dp)  # of what size: a whole one is so many
    if parameter_counts is not None:
        each = _to_byte_array("parameter_counts", parameter_counts)
        parts = np.maximum(each, 1) / np.maximum(np.ceil(each / dp), 1)
    whole = {"params": params, "grads": grads, "optimizer": optimizer}
    left = {}
    for name, value in whole.items():
        left[name] = _to_byte_array(name, value) / (parts if is_sharded(name, zero) else 1.0)
    return ModelStates(**{name: v if v.ndim else v.item() for name, v in left.items()})


def _as_integer(value: object, min_value: int) -> int | None:
    fits = (
        isinstance(value, int | np.integer) and not isinstance(value, bool) and value >= min_value
    )
    return int(value) if fits else None  # type: ignore[call-overload]


def _to_byte_array(name: str, value: ArrayLike) -> NDArray[np.float64]:
    return np.array(to_per_stage(name, value, UsageError), float)
