"""The numbers of static buffers of a rank, by kind of value."""

from __future__ import annotations

from collections import namedtuple
from typing import TYPE_CHECKING, Final, NamedTuple

from schedir.ir.isa.instructions import NEIGHBOR_VALUES, SLOT_VALUES, Value

if TYPE_CHECKING:
    from typing import Self

# This number means that the number of slots is not specified: each value has a separate slot.
UNSHARED_SLOTS: Final = 2**31
# Name of a kind of slots in host memory -> kind of value in these slots.
HOST_SLOT_VALUES: Final = {"host": Value.SAVED, "state_host": Value.STATE}

if TYPE_CHECKING:

    class _Slots(NamedTuple):
        act_in: int
        act_out: int
        grad_in: int
        grad_out: int
        skip_in: int = UNSHARED_SLOTS
        skip_out: int = UNSHARED_SLOTS
        skip_grad_in: int = UNSHARED_SLOTS
        skip_grad_out: int = UNSHARED_SLOTS
        saved: int = UNSHARED_SLOTS
        unsharded_params: int = UNSHARED_SLOTS
        state: int = UNSHARED_SLOTS
        host: int = UNSHARED_SLOTS
        state_host: int = UNSHARED_SLOTS
else:
    _SLOT_KINDS = [*(kind.name.lower() for kind in SLOT_VALUES), *HOST_SLOT_VALUES]
    _Slots = namedtuple(
        "_Slots", _SLOT_KINDS, defaults=[UNSHARED_SLOTS] * (len(_SLOT_KINDS) - len(NEIGHBOR_VALUES))
    )


class SlotCounts(_Slots):
    """The number of static slots of a rank, for each kind of value.

    `schedir/analysis/memory/buffer_slots.py` defines which values use which slots. With the number
    `UNSHARED_SLOTS`, each value has a separate slot. `UNSHARED_SLOTS` is the default of all
    fields except the first four, which are required.

    Args:
        act_in: Received activations.
        act_out: Activations to send.
        grad_in: Received gradients of activations.
        grad_out: Gradients of activations to send.
        skip_in: Received values of skip connections.
        skip_out: Values of skip connections to send.
        skip_grad_in: Received gradients of skip connections.
        skip_grad_out: Gradients of skip connections to send.
        saved: Saved activations on the device.
        unsharded_params: Unsharded weights of stages.
        state: Optimizer states of stages on the device.
        host: Saved activations on the host.
        state_host: Optimizer states on the host, if the states are on the disk between steps.
    """

    __slots__ = ()

    @classmethod
    def unspecified(cls) -> Self:
        """Return counts that specify no number.

        Returns:
            Counts with `UNSHARED_SLOTS` for each kind.
        """
        return cls(**dict.fromkeys(cls._fields, UNSHARED_SLOTS))

    def specified(self) -> dict[str, int]:
        """Return the numbers of slots that are specified.

        Returns:
            Name of the kind -> number of slots.
        """
        return {kind: number for kind, number in self._asdict().items() if number != UNSHARED_SLOTS}

    def __repr__(self) -> str:
        counts = ", ".join(f"{kind}={number}" for kind, number in self.specified().items())
        return f"SlotCounts({counts})"
