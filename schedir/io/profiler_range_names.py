"""Names of profiler ranges, and the instructions that they mean.

- `PP:0F3`, `PP:2SEND_F1`, `PP:(0F7;7B3)OVERLAP_F_B`: torch's runtime schedules
  (torch.distributed.pipelining.schedules, `_get_profiler_function_name`), and whoever marks in
  their words, as `schedir.instrument` does;
- `PP:(0SEND_F1;0RECV_B0)BATCH_P2P`: messages issued as one, and `PP:1WAIT_RECV_F3`: where one that
  was posted earlier is waited for;
- `PP:` and an instruction as `schedir print` writes it: what torch has no word for;
- `Forward 3`, `Backward 3`: torch's ScheduleGPipe, which has one stage on each rank.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final, NamedTuple

from schedir.errors import TraceError
from schedir.io.torch_csv import ACTIONS, PAIR, READ_OVER
from schedir.ir.isa.instructions import BY_TEXT, ROWS, TRANSFERS, Instr, Opcode, Scope
from schedir.ir.stream import Stream

OF_RANK: Final = -1  # a stage that is not said: the rank has one only

_WAIT: Final = "WAIT_"
_JOINED: Final = "PP:&"
_SEVERAL: Final = {PAIR: False, "BATCH_P2P": False, "WAIT": True}  # and whether that is a wait
_ACTION: Final = re.compile(r"(\d{1,9})([A-Z_]+)(\d{0,9})", re.ASCII)
_GROUP: Final = re.compile(r"\(([^()]*)\)(\w+)", re.ASCII)
_OWN: Final = re.compile(r"([a-z_A-Z]+)(?: (\d{1,9}))?(?:\.(\d{1,9}))?", re.ASCII)
_GPIPE: Final = re.compile(r"(Forward|Backward) (\d{1,9})", re.ASCII)
_BY_GPIPE: Final = {"Forward": ACTIONS["F"], "Backward": ACTIONS["B"]}
_WORD: Final = {op: word for word, op in ACTIONS.items()}
_OTHERS: Final = {"STEP": BY_TEXT["step"]}


class NamedInstruction(NamedTuple):
    """An instruction that a mark names."""

    op: Opcode
    stage: int
    mb: int


class RangeName(NamedTuple):
    """What a name says: instructions that run as one, or, with `waits`, the messages that the
    range is the wait for.  None at all for what is read over.  What is `joined` runs as one with
    what is marked before it."""

    actions: tuple[NamedInstruction, ...]
    waits: bool = False
    joined: bool = False


def is_pp(name: str) -> bool:
    """Whether a range is named in the words of torch's runtime schedules."""
    return name.startswith("PP:")


def marks(name: str) -> bool:
    """Whether a range with this name is meant to mark an instruction."""
    return is_pp(name) or _GPIPE.fullmatch(name) is not None


def mark_of(instr: Instr, joined: bool = False) -> str:
    """The name of a range around an instruction, from which `read_mark` reads it.

    `joined` says that it runs as one with the instruction before it.

    >>> from schedir import Instr, Opcode
    >>> [mark_of(Instr(op, 1, 0)) for op in (Opcode.Forward, Opcode.ReduceGrads, Opcode.ReduceTied)]
    ['PP:1F0', 'PP:1REDUCE_GRAD', 'PP:reduce_tied 1']
    """
    if joined:
        return _JOINED + mark_of(instr).removeprefix("PP:")
    word, each = _WORD.get(instr.op), ROWS[instr.op].per is Scope.MICROBATCH
    if word is None or (instr.mb and not each):  # torch has no word for a later update
        return f"PP:{instr}"
    return f"PP:{instr.stage}{word}" + f"{instr.mb}" * each


@lru_cache(maxsize=1 << 16)
def marks_of(stream: Stream) -> list[str]:
    """The ranges that a rank's instructions are, by their index."""
    return [mark_of(*each) for each in zip(stream, stream.joined.tolist(), strict=True)]


def read_mark(name: str) -> RangeName:
    """What a mark says.  Raises TraceError for one that says nothing that is known."""
    if found := _GPIPE.fullmatch(name):
        return RangeName((NamedInstruction(_BY_GPIPE[found[1]], OF_RANK, int(found[2])),))
    if name.startswith(_JOINED):
        mark = _single(name, name.removeprefix(_JOINED))
        if mark.waits or not mark.actions:
            raise _unknown(name)
        return mark._replace(joined=True)
    text = name.removeprefix("PP:")
    group = _GROUP.fullmatch(text)
    if group is None:
        return _single(name, text)
    parts = [_single(name, part.strip()) for part in group[1].split(";")]
    if group[2] not in _SEVERAL:
        raise _unknown(name)
    actions = tuple(action for part in parts for action in part.actions)
    kinds = {action.op in TRANSFERS for action in actions}
    if any(part.waits for part in parts) or kinds != {group[2] != PAIR} or not actions:
        raise _unknown(name)
    return RangeName(actions, waits=_SEVERAL[group[2]])


def _single(name: str, text: str) -> RangeName:
    if text in _OTHERS:
        return RangeName((NamedInstruction(_OTHERS[text], 0, 0),))
    if found := _ACTION.fullmatch(text):
        stage, kind, mb = found.groups()
        if kind in ACTIONS:
            op = ACTIONS[kind]
            if (ROWS[op].per is Scope.MICROBATCH) == bool(mb):
                return RangeName((NamedInstruction(op, int(stage), int(mb or 0)),))
        elif kind.removeprefix(_WAIT) in ACTIONS and kind.startswith(_WAIT) and mb:
            return RangeName(
                (NamedInstruction(ACTIONS[kind.removeprefix(_WAIT)], int(stage), int(mb)),), True
            )
        elif kind in READ_OVER:
            return RangeName(())
    elif (found := _OWN.fullmatch(text)) and found[1] in BY_TEXT:
        op = BY_TEXT[found[1]]
        first, second = (None if n is None else int(n) for n in found.group(2, 3))
        if ROWS[op].per is Scope.RANK:  # written with its update, where that is not the first
            return RangeName((NamedInstruction(op, 0, first or 0),))
        if first is not None and (second is not None or ROWS[op].per is not Scope.MICROBATCH):
            return RangeName((NamedInstruction(op, first, second or 0),))
    raise _unknown(name)


def _unknown(name: str) -> TraceError:
    return TraceError(
        f"the range {name!r:.80} marks no instruction that is known",
        hint="those of torch are known, such as PP:0F3, PP:2SEND_F1 and PP:(0F7;7B3)OVERLAP_F_B",
    )
