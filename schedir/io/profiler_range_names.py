"""Names of profiler ranges, and the instructions that they mark.

The names are:

- `PP:0F3`, `PP:2SEND_F1`, `PP:(0F7;7B3)OVERLAP_F_B`: names of torch's runtime schedules
  (`_get_profiler_function_name` in torch.distributed.pipelining.schedules). `schedir.instrument`
  uses them too.
- `PP:(0SEND_F1;0RECV_B0)BATCH_P2P`: messages that are issued as one batch.
- `PP:1WAIT_RECV_F3`: the wait for a message that was posted earlier.
- `PP:` and an instruction as `schedir print` writes it: instructions for which torch has no name.
- `Forward 3`, `Backward 3`: names of torch's ScheduleGPipe, which has one stage on each rank.
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

UNSPECIFIED_STAGE: Final = -1  # the name has no stage, because the rank has only one stage

_WAIT_PREFIX: Final = "WAIT_"
_JOINED_PREFIX: Final = "PP:&"
# The kinds of groups. The value is True if the group is a wait for messages.
_GROUP_KINDS: Final = {
    PAIR_ACTION: False,
    "BATCH_P2P": False,
    "WAIT": True,
}
_ACTION_PATTERN: Final = re.compile(r"(\d{1,9})([A-Z_]+)(\d{0,9})", re.ASCII)
_GROUP_PATTERN: Final = re.compile(r"\(([^()]*)\)(\w+)", re.ASCII)
_INSTRUCTION_PATTERN: Final = re.compile(r"([a-z_A-Z]+)(?: (\d{1,9}))?(?:\.(\d{1,9}))?", re.ASCII)
_GPIPE_PATTERN: Final = re.compile(r"(Forward|Backward) (\d{1,9})", re.ASCII)
_GPIPE_OPS: Final = {"Forward": ACTIONS["F"], "Backward": ACTIONS["B"]}
_ACTION_BY_OP: Final = {op: word for word, op in ACTIONS.items()}
_OTHER_OPS: Final = {"STEP": OPCODE_BY_TEXT["step"]}


class NamedInstruction(NamedTuple):
    """An instruction that the name of a range contains.

    Args:
        op: The opcode.
        stage: The stage, `UNSPECIFIED_STAGE` if the name has none, 0 if `op` has no stage.
        mb: The microbatch, 0 if `op` has none.
    """

    op: Opcode
    stage: int
    mb: int


class RangeName(NamedTuple):
    """The parsed name of a range.

    Args:
        actions: The instructions that run as one. For a wait, the messages that the range waits
            for. Empty if the range is ignored.
        is_wait: True if the range is a wait for messages.
        is_joined: True if the instruction and the instruction of the previous range run as one.
    """

    actions: tuple[NamedInstruction, ...]
    is_wait: bool = False
    is_joined: bool = False


def is_torch_range(name: str) -> bool:
    """Return whether the name of a range has the form of torch's runtime schedules.

    Args:
        name: The name of a range.
    """
    return name.startswith("PP:")


def is_instruction_range(name: str) -> bool:
    """Return whether the name of a range is meant to mark an instruction.

    Args:
        name: The name of a range.
    """
    return is_torch_range(name) or _GPIPE_PATTERN.fullmatch(name) is not None


def format_range_name(instr: Instr, is_joined: bool = False) -> str:
    """Return the name of the range around an instruction, which `parse_range_name` parses.

    Args:
        instr: The instruction.
        is_joined: True if the instruction and the instruction before it run as one.

    Example:
        >>> from schedir import Instr, Opcode
        >>> ops = (Opcode.Forward, Opcode.ReduceGrads, Opcode.ReduceTied)
        >>> [format_range_name(Instr(op, 1, 0)) for op in ops]
        ['PP:1F0', 'PP:1REDUCE_GRAD', 'PP:reduce_tied 1']
    """
    if is_joined:
        return _JOINED_PREFIX + format_range_name(instr).removeprefix("PP:")
    word = _ACTION_BY_OP.get(instr.op)
    has_microbatch = INSTRUCTIONS[instr.op].scope is Scope.MICROBATCH
    # torch has no names for the instructions of the second and later updates.
    if word is None or (instr.mb and not has_microbatch):
        return f"PP:{instr}"
    return f"PP:{instr.stage}{word}" + f"{instr.mb}" * has_microbatch


@lru_cache(maxsize=1 << 16)
def format_range_names(stream: Stream) -> list[str]:
    """Return the names of the ranges of a rank, by the index of the instruction.

    Args:
        stream: The instructions of the rank.
    """
    return [format_range_name(*pair) for pair in zip(stream, stream.joined.tolist(), strict=True)]


def parse_range_name(name: str) -> RangeName:
    """Parse the name of a range.

    Args:
        name: The name, for which `is_instruction_range` is true.

    Returns:
        The instructions that the name marks.

    Raises:
        TraceError: The name marks no instruction.
    """
    if match := _GPIPE_PATTERN.fullmatch(name):
        return RangeName(
            (NamedInstruction(_GPIPE_OPS[match[1]], UNSPECIFIED_STAGE, int(match[2])),)
        )
    if name.startswith(_JOINED_PREFIX):
        joined_range = _parse_single(name, name.removeprefix(_JOINED_PREFIX))
        if joined_range.is_wait or not joined_range.actions:
            raise _make_unknown_range_error(name)
        return joined_range._replace(is_joined=True)
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
    if match := _ACTION_PATTERN.fullmatch(text):
        stage, kind, mb = match.groups()
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
    elif (match := _INSTRUCTION_PATTERN.fullmatch(text)) and match[1] in OPCODE_BY_TEXT:
        op = OPCODE_BY_TEXT[match[1]]
        first_number, second_number = (None if n is None else int(n) for n in match.group(2, 3))
        # The number of an instruction without a stage is the number of its update. The first update
        # has no number.
        if INSTRUCTIONS[op].scope is Scope.RANK:
            return RangeName((NamedInstruction(op, 0, first_number or 0),))
        if first_number is not None and (
            second_number is not None or INSTRUCTIONS[op].scope is not Scope.MICROBATCH
        ):
            return RangeName((NamedInstruction(op, first_number, second_number or 0),))
    raise _make_unknown_range_error(name)


def _make_unknown_range_error(name: str) -> TraceError:
    return TraceError(
        f"the range {name!r:.80} does not name an instruction",
        hint="ranges have torch's names, such as PP:0F3, PP:2SEND_F1 and PP:(0F7;7B3)OVERLAP_F_B",
    )
