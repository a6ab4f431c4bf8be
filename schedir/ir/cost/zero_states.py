"""Compute the bytes of weights, gradients and optimizer state per replica by ZeRO level.

The levels are those of arXiv 1910.02054.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from schedir.errors import UsageError, describe
from schedir.ir.cost.per_stage_values import to_per_stage

# Model state -> the first ZeRO level at which each replica has only a part of it.  The paper calls
# levels 1 to 3 P_os, P_os+g and P_os+g+p.
SHARDED_FROM_LEVEL: Final = {"optimizer": 1, "grads": 2, "params": 3}
ZERO_LEVEL_COUNT: Final = 1 + max(SHARDED_FROM_LEVEL.values())
# Model state -> label of its shards in a list of memory use. `UNSHARDED_LABELS` has the labels of
# the unsharded copies.
SHARDED_LABELS: Final = {
    "params": "sharded weights", "grads": "sharded gradients",
    "optimizer": "sharded optimizer state",
}  # fmt: skip
UNSHARDED_LABELS: Final = {"params": "unsharded weights", "grads": "unsharded gradients"}


def is_sharded(size_name: str, zero: int) -> bool:
    """Return whether each replica has only a part of a model state at a ZeRO level.

    Args:
        size_name: Name of a field of `Sizes`.
        zero: ZeRO level, 0 to 3.

    Returns:
        True if the state is sharded. Other fields of `Sizes` are never sharded.
    """
    return zero >= SHARDED_FROM_LEVEL.get(size_name, ZERO_LEVEL_COUNT)


class ModelStates(NamedTuple):
    """Bytes of one replica's model states: floats, or arrays if `zero_model_states` got arrays.

    Args:
        params: Bytes of the parameters.
        grads: Bytes of the gradients.
        optimizer: Bytes of the optimizer state.
    """

    params: Any
    grads: Any
    optimizer: Any

    @property
    def total(self) -> Any:
        """The bytes of all three states."""
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
    """Return the bytes of a model's states on each replica at a ZeRO level.

    Each replica has 1/dp of a sharded state. The optimizer state is sharded from level 1 on, the
    gradients from level 2 on, and the parameters from level 3 on.

    For example, a model has Psi parameters of 16 bits, gradients of 16 bits, and 12 bytes of
    optimizer state per parameter. The model needs 16 Psi bytes at level 0, 4 Psi + 12 Psi/dp bytes
    at level 1, 2 Psi + 14 Psi/dp bytes at level 2, and 16 Psi/dp bytes at level 3.

    Args:
        params: Bytes of the unsharded parameters: a number, or one per stage or bucket.
        grads: Bytes of the unsharded gradients, in the same form.
        optimizer: Bytes of the unsharded optimizer state, in the same form.
        zero: ZeRO level, 0 to 3.
        dp: Number of replicas.
        parameter_counts: Number of parameters of each stage or bucket. Shards then have
            ceil(count / dp) parameters, and the last shards are padded. If None, a shard has
            exactly 1/dp of the bytes, as in the paper. Unsharded states are never padded.

    Returns:
        The bytes of each state on one replica.

    Raises:
        UsageError: The level or the number of replicas is invalid, or a number is negative or not
            finite.

    References:
        arXiv 1910.02054, sections 5.1 to 5.3.

    Example:
        >>> from schedir import zero_model_states
        >>> gigabytes = [zero_model_states(15, 15, 90, zero=zero, dp=64).total for zero in range(4)]
        >>> [round(each, 2) for each in gigabytes]  # a model with 7.5 billion parameters
        [120.0, 31.41, 16.64, 1.88]
        >>> zero_model_states(20, 20, 120, zero=3, dp=4, parameter_counts=10)  # 3 per shard
        ModelStates(params=6.0, grads=6.0, optimizer=36.0)
    """
    if not _is_integer(zero, 0) or zero >= ZERO_LEVEL_COUNT:
        raise UsageError(
            f"zero must be a ZeRO level from 0 to {ZERO_LEVEL_COUNT - 1}, not {describe(zero)}",
            fields=["zero"],
        )
    if not _is_integer(dp, 1):
        raise UsageError(
            f"dp must be a number of replicas, 1 or more, not {describe(dp)}", fields=["dp"]
        )
    # The size of an unsharded state, divided by the size of a shard.
    shard_ratio: NDArray[np.float64] | float = float(dp)
    if parameter_counts is not None:
        counts = _to_byte_array("parameter_counts", parameter_counts)
        shard_ratio = np.maximum(counts, 1) / np.maximum(np.ceil(counts / dp), 1)
    unsharded = {"params": params, "grads": grads, "optimizer": optimizer}
    states = {}
    for name, value in unsharded.items():
        states[name] = _to_byte_array(name, value) / (
            shard_ratio if is_sharded(name, zero) else 1.0
        )
    return ModelStates(**{name: v if v.ndim else v.item() for name, v in states.items()})


def _is_integer(value: object, min_value: int) -> bool:
    is_number = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return is_number and value >= min_value  # type: ignore[operator]


def _to_byte_array(name: str, value: ArrayLike) -> NDArray[np.float64]:
    return np.array(to_per_stage(name, value, UsageError), float)
