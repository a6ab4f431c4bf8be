"""The numbers of static buffers of a rank, by kind of value."""

from __future__ import annotations

from collections import namedtuple
from typing import TYPE_CHECKING, Final, NamedTuple

from schedir.ir.isa.instructions import NEIGHBOR_VALUES, SLOT_VALUES, Value

if TYPE_CHECKING:
    from typing import Self

# The number of slots where none is given: each value has a slot of its own.
UNSHARED_SLOTS: Final = 2**31
# Names of slots of the host's memory, by what is moved there.
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
    """How many static slots a rank has for what is taken in and put out, in activations and
    in gradients (`schedir/analysis/memory/buffer_slots.py` says who lives in which); and on the
    `host`, for what forwards saved, and for states of the optimizer that lie on the disk
    (`state_host`)."""

    __slots__ = ()

    @classmethod
    def unspecified(cls) -> Self:
        """Nothing said of any kind."""
        return cls(**dict.fromkeys(cls._fields, UNSHARED_SLOTS))

    def specified(self) -> dict[str, int]:
        """The numbers that are said, by kind."""
        return {kind: number for kind, number in self._asdict().items() if number != UNSHARED_SLOTS}

    def __repr__(self) -> str:
        return (
            f"Slots({', '.join(f'{kind}={number}' for kind, number in self.specified().items())})"
        )
