"""The numbers of static buffers of a rank, by kind of value."""

from __future__ import annotations

from collections import namedtuple
from typing import TYPE_CHECKING, Final, NamedTuple

from schedir.ir.isa.instructions import BETWEEN_NEIGHBOURS, SLOTTED, Value

if TYPE_CHECKING:
    from typing import Self

OWN: Final = 2**31  # of slots: each value has its own, where nobody says how many there are
# Names of slots of the host's memory, by what is moved there.
ON_HOST: Final = {"host": Value.SAVED, "state_host": Value.STATE}

if TYPE_CHECKING:

    class _Slots(NamedTuple):
        act_in: int
        act_out: int
        grad_in: int
        grad_out: int
        skip_in: int = OWN
        skip_out: int = OWN
        skip_grad_in: int = OWN
        skip_grad_out: int = OWN
        saved: int = OWN
        unsharded_params: int = OWN
        state: int = OWN
        host: int = OWN
        state_host: int = OWN
else:
    _KINDS = [*(kind.name.lower() for kind in SLOTTED), *ON_HOST]
    _Slots = namedtuple("_Slots", _KINDS, defaults=[OWN] * (len(_KINDS) - len(BETWEEN_NEIGHBOURS)))


class SlotCounts(_Slots):
    """How many static slots a rank has for what is taken in and put out, in activations and
    in gradients (`schedir/analysis/memory/buffer_slots.py` says who lives in which); and on the
    `host`, for what forwards saved, and for states of the optimizer that lie on the disk
    (`state_host`)."""

    __slots__ = ()

    @classmethod
    def unsaid(cls) -> Self:
        """Nothing said of any kind."""
        return cls(**dict.fromkeys(cls._fields, OWN))

    def said(self) -> dict[str, int]:
        """The numbers that are said, by kind."""
        return {kind: number for kind, number in self._asdict().items() if number != OWN}

    def __repr__(self) -> str:
        return f"Slots({', '.join(f'{kind}={number}' for kind, number in self.said().items())})"
