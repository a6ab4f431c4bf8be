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
from schedir.io.torch_csv import ACTIONS, IGNORED_ACTIONS, PAIR_ACTION
from schedir.ir.isa.instructions import (
    INSTRUCTIONS,
    OPCODE_BY_TEXT,
    TRANSFER_OPS,
    Instr,
    Opcode,
    Scope,
)
from schedir.ir.stream import Stream

UNSPECIFIED_STAGE: Final = -1  # a stage that is not said: the rank has one only

_WAIT_PREFIX: Final = "WAIT_"
_JOINED_PREFIX: Final = "PP:&"
_GROUP_KINDS: Final = {
    PAIR_ACTION: False,
    "BATCH_P2P": False,
    "WAIT": True,
}  # and whether that is a wait
_ACTION_PATTERN: Final = re.compile(r"(\d{1,9})([A-Z_]+)(\d{0,9})", re.ASCII)
_GROUP_PATTERN: Final = re.compile(r"\(([^()]*)\)(\w+)", re.ASCII)
_INSTRUCTION_PATTERN: Final = re.compile(r"([a-z_A-Z]+)(?: (\d{1,9}))?(?:\.(\d{1,9}))?", re.ASCII)
_GPIPE_PATTERN: Final = re.compile(r"(Forward|Backward) (\d{1,9})", re.ASCII)
_GPIPE_OPS: Final = {"Forward": ACTIONS["F"], "Backward": ACTIONS["B"]}
_ACTION_BY_OP: Final = {op: word for word, op in ACTIONS.items()}
_OTHER_OPS: Final = {"STEP": OPCODE_BY_TEXT["step"]}


class NamedInstruction(NamedTuple):
    """An instruction that a mark names."""

    op: Opcode
    stage: int
    mb: int


class RangeName(NamedTuple):
    """What a name says: instructions that run as one, or, with `is_wait`, the messages that the
    range is the wait for.  None at all for what is read over.  What is `is_joined` runs as one with
    what is marked before it."""

    actions: tuple[NamedInstruction, ...]
    is_wait: bool = False
    is_joined: bool = False


def is_torch_range(name: str) -> bool:
    """Whether a range is named in the words of torch's runtime schedules."""
    return name.startswith("PP:")


def is_instruction_range(name: str) -> bool:
    """Whether a range with this name is meant to mark an instruction."""
    return is_torch_range(name) or _GPIPE_PATTERN.fullmatch(name) is not None


def format_range_name(instr: Instr, is_joined: bool = False) -> str:
    """The name of a range around an instruction, from which `parse_range_name` reads it.

    `is_joined` says that it runs as one with the instruction before it.

    >>> from schedir import Instr, Opcode
    >>> ops = (Opcode.Forward, Opcode.ReduceGrads, Opcode.ReduceTied)
    >>> [format_range_name(Instr(op, 1, 0)) for op in ops]
    ['PP:1F0', 'PP:1REDUCE_GRAD', 'PP:reduce_tied 1']
    """
    if is_joined:
        return _JOINED_PREFIX + format_range_name(instr).removeprefix("PP:")
    word, each = _ACTION_BY_OP.get(instr.op), INSTRUCTIONS[instr.op].scope is Scope.MICROBATCH
    if word is None or (instr.mb and not each):  # torch has no word for a later update
        return f"PP:{instr}"
    return f"PP:{instr.stage}{word}" + f"{instr.mb}" * each


@lru_cache(maxsize=1 << 16)
def format_range_names(stream: Stream) -> list[str]:
    """The ranges that a rank's instructions are, by their index."""
    return [format_range_name(*each) for each in zip(stream, stream.joined.tolist(), strict=True)]


def parse_range_name(name: str) -> RangeName:
    """What a mark says.  Raises TraceError for one that says nothing that is known."""
    if found := _GPIPE_PATTERN.fullmatch(name):
        return RangeName(
            (NamedInstruction(_GPIPE_OPS[found[1]], UNSPECIFIED_STAGE, int(found[2])),)
        )
    if name.startswith(_JOINED_PREFIX):
        mark = _parse_single(name, name.removeprefix(_JOINED_PREFIX))
        if mark.is_wait or not mark.actions:
            raise _make_unknown_range_error(name)
        return mark._replace(is_joined=True)
    text = name.removeprefix("PP:")
    group = _GROUP_PATTERN.fullmatch(text)
    if group is None:
        return _parse_single(name, text)
    parts = [_parse_single(name, part.strip()) for part in group[1].split(";")]
    if group[2] not in _GROUP_KINDS:
        raise _make_unknown_range_error(name)
    actions = tuple(action for part in parts for action in part.actions)
    kinds = {action.op in TRANSFER_OPS for action in actions}
    if any(part.is_wait for part in parts) or kinds != {group[2] != PAIR_ACTION} or not actions:
        raise _make_unknown_range_error(name)
    return RangeName(actions, is_wait=_GROUP_KINDS[group[2]])


def _parse_single(name: str, text: str) -> RangeName:
    if text in _OTHER_OPS:
        return RangeName((NamedInstruction(_OTHER_OPS[text], 0, 0),))
    if found := _ACTION_PATTERN.fullmatch(text):
        stage, kind, mb = found.groups()
        if kind in ACTIONS:
            op = ACTIONS[kind]
            if (INSTRUCTIONS[op].scope is Scope.MICROBATCH) == bool(mb):
                return RangeName((NamedInstruction(op, int(stage), int(mb or 0)),))
        elif kind.removeprefix(_WAIT_PREFIX) in ACTIONS and kind.startswith(_WAIT_PREFIX) and mb:
            return RangeName(
                (NamedInstruction(ACTIONS[kind.removeprefix(_WAIT_PREFIX)], int(stage), int(mb)),),
                True,
            )
        elif kind in IGNORED_ACTIONS:
            return RangeName(())
    elif (found := _INSTRUCTION_PATTERN.fullmatch(text)) and found[1] in OPCODE_BY_TEXT:
        op = OPCODE_BY_TEXT[found[1]]
        first, second = (None if n is None else int(n) for n in found.group(2, 3))
        if (
            INSTRUCTIONS[op].scope is Scope.RANK
        ):  # written with its update, where that is not the first
            return RangeName((NamedInstruction(op, 0, first or 0),))
        if first is not None and (
            second is not None or INSTRUCTIONS[op].scope is not Scope.MICROBATCH
        ):
            return RangeName((NamedInstruction(op, first, second or 0),))
    raise _make_unknown_range_error(name)


def _make_unknown_range_error(name: str) -> TraceError:
    return TraceError(
        f"the range {name!r:.80} marks no instruction that is known",
        hint="those of torch are known, such as PP:0F3, PP:2SEND_F1 and PP:(0F7;7B3)OVERLAP_F_B",
    )
