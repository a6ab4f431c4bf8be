"""Validate the rows of the tables in `instruction_table.py`.

A row that breaks one would be read as something else, in silence: so nothing that reads the tables
is imported with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields
from enum import IntEnum
from itertools import chain
from typing import Final

from schedir.ir.isa.instructions import (
    BOUNDARY,
    FORMS,
    LANES,
    ROWS,
    TIERS,
    VALUES,
    Change,
    Form,
    FormRow,
    Lane,
    LaneRow,
    Opcode,
    ProducerRule,
    Row,
    Scope,
    Value,
    ValueRow,
)
from schedir.ir.program import Program

# What there is one of for a rank that meets others in each kind of group: so none meets itself.
_MEET: Final = {
    "model": (Scope.RANK,),
    "holders": (Scope.STAGE, Scope.OCCURRENCE),
    "tied": (Scope.STAGE,),
}
_CHAINED: Final = (ProducerRule.ONCE, ProducerRule.LATEST)
_NEAREST: Final = (
    ProducerRule.LATEST,
    ProducerRule.LATEST_OR_START,
)  # found by what stands nearest before
# Of which traits a value can be: those of which a default says that it is not there.
_TRAITS: Final = {f.name for f in fields(Program) if f.metadata and f.default is not MISSING}
# What has a begin and an end, between which it takes memory.
_LIVES: Final = (*_CHAINED, ProducerRule.ALL)


class TableError(Exception):
    """A row of a table cannot be read: which, and what it must keep to."""


def require_tables(
    rows: Sequence[Row] = ROWS,
    tokens: Sequence[ValueRow] = VALUES,
    lanes: Sequence[LaneRow] = LANES,
    forms: Sequence[FormRow] = FORMS,
) -> None:
    """Raise TableError for the first row that breaks a rule."""
    of_forms = _of_order(Form, [row.form for row in forms])
    for fault in chain(of_forms, faults(rows, tokens, lanes)):
        raise TableError(fault)


def faults(
    rows: Sequence[Row], tokens: Sequence[ValueRow], lanes: Sequence[LaneRow]
) -> Iterator[str]:
    """What is wrong with the tables, row by row."""
    yield from _of_order(Opcode, [row.op for row in rows])
    yield from _of_order(Value, [value.value for value in tokens])
    yield from _of_order(Lane, [lane.lane for lane in lanes])
    for value in tokens:
        yield from _of_token(value, rows)
    texts: dict[str, Row] = {}
    for row in rows:
        if texts.setdefault(row.text, row) is not row:
            yield f"{row.op.name}: its text is that of {texts[row.text].op.name}, {row.text!r}"
        for fault in (*_of_row(row, rows, lanes), *_of_values(row, rows, tokens)):
            yield f"{row.op.name}: {fault}"


def _of_order(all_of: type[IntEnum], places: Sequence[IntEnum]) -> Iterator[str]:
    """Faults of a table's order: each row stands in the place that its number says."""
    for place, one in enumerate(places):
        if one != place:
            yield f"{one.name} is number {one}, and its row stands in place {place}"
    for one in [*all_of][len(places) :]:
        yield f"{one.name} has no row"


def _of_token(value: ValueRow, rows: Sequence[Row]) -> Iterator[str]:
    """Faults of a value."""
    token, name = value.value, value.value.name
    if value.local_source is None and not any(token in row.gives for row in rows):
        yield f"{name}: no instruction gives it"
    if value.initial_tier:
        yield from _of_what_lies(value, rows)
    if value.producer_rule in _NEAREST and value.per is Scope.OCCURRENCE:
        yield f"{name}: what is made again and again is one value of its stage, not one a turn"
    if value.producer_rule is ProducerRule.LATEST_OR_START and any(
        token in row.frees for row in rows
    ):
        yield f"{name}: it is there from the start on, and nothing frees it"
    if value.attribute and value.attribute not in _TRAITS:
        yield f"{name}: there is no trait {value.attribute!r} of programs with a default"
    if value.size and value.producer_rule not in _LIVES:
        rule = value.producer_rule.name
        yield f"{name}: bytes are counted of what begins and ends, not of {rule}"
    if value.size and value.per is Scope.RANK:
        yield f"{name}: bytes are told for each stage, not for each rank"
    if value.local_source is not None and value.peer is None:
        yield f"{name}: it is handed over, and nothing says by which stage"
    if value.peer is not None and (value.per is not Scope.MICROBATCH or not value.size):
        yield f"{name}: what crosses a boundary is of a microbatch, and has a size"
    if value.converted_from is not None:
        for row in rows:
            if token in {*row.gives} - {*row.needs} and value.converted_from[0] not in row.frees:
                yield f"{name}: {row.op.name} makes it, and does not free what it is made of"


def _of_what_lies(value: ValueRow, rows: Sequence[Row]) -> Iterator[str]:
    """Faults of a value that is there from the start on."""
    token, name = value.value, value.value.name
    if value.initial_tier not in TIERS:
        yield f"{name}: it lies on one of {', '.join(TIERS)}, not on {value.initial_tier!r}"
    if value.producer_rule is not ProducerRule.LATEST:
        yield f"{name}: it lies somewhere from the start on, and is found by the nearest giver"
    for row in rows:
        if (token in row.gives and token not in row.needs) or token in row.frees:
            yield f"{name}: it is there from the start on, and {row.op.name} makes or frees it"


def _of_row(row: Row, rows: Sequence[Row], lanes: Sequence[LaneRow]) -> Iterator[str]:
    """Faults of a row by itself: its text, its lane, and whom it meets."""
    lane = lanes[row.lane]
    if not (row.text.isidentifier() and row.text.isascii()):
        yield f"its text is one word, not {row.text!r}"
    if not {*row.frees} <= {*row.needs}:
        yield "it frees what it does not need"
    if row.computes and (row.lane is not Lane.COMPUTE or row.per is not Scope.MICROBATCH):
        yield "a row that computes is per microbatch, on the lane COMPUTE"
    if row.between_segments and (row.ring is None or row.ring.members != "tp"):
        yield "a row between segments is a collective of the tensor-parallel group"
    if row.traffic is not None and row.traffic.attribute not in (
        "",
        "checkpoint_snapshots",
        "optimizer_placement",
    ):
        yield f"a cluster does not know of the trait {row.traffic.attribute!r}"
    if row.traffic is not None and not row.traffic.sizes and row.form is None:
        yield "traffic without sizes needs a form: its bytes are those of the changed value"
    if row.drains_lane and lane.host != "starts":
        yield f"hosts wait at lane {row.lane.name} anyway: nothing is drained there"
    if bool(row.peer) != lane.wire:
        yield "what has a hop is on a wire, and nothing else is"
    if row.peer:
        other = rows[row.partner] if row.partner is not None else row
        if other.partner is not row.op or other.peer is not row.peer.back:
            yield "the other side of a message meets it, a hop back"
        if row.per is not Scope.MICROBATCH:
            yield "a message is of a microbatch"
        if len(row.gives) + len(row.needs) != 1:
            yield "a message moves one value: it is needed at one side, and given at the other"
    elif row.partner not in (None, row.op):
        yield "without a hop it meets others of its own kind"
    elif row.partner is None and row.group:
        yield f"it is of the group {row.group!r}, and meets nobody"
    elif row.partner is not None and row.per not in _MEET.get(row.group, ()):
        can = " or ".join(per.name for per in _MEET.get(row.group, ())) or "a group"
        yield f"its group is {row.group!r}, which takes {can}, not {row.per.name}"


def _of_values(row: Row, rows: Sequence[Row], tokens: Sequence[ValueRow]) -> Iterator[str]:
    """Faults in what a row does with values: how it is told which is meant, and how they change."""
    for token in {*row.needs, *row.gives}:
        value = tokens[token]
        once = value.producer_rule is ProducerRule.ONCE or value.per is Scope.MICROBATCH
        if value.producer_rule in (*_CHAINED, *_NEAREST) and once and row.per is not value.per:
            yield f"{token.name} is one for each {value.per.name}, and it for each {row.per.name}"
        if row.peer and value.peer is not row.peer:
            yield f"{token.name} does not go where its message does"
        again = value.producer_rule in _NEAREST or (
            value.producer_rule is ProducerRule.ALL and value.size
        )
        if again and value.per is Scope.STAGE and row.per is Scope.RANK:
            yield f"{token.name} is one for each STAGE, and it for each RANK"
        if value.producer_rule is ProducerRule.VERSION and token in row.gives and row.per not in (
            Scope.STAGE, Scope.RANK,
        ):  # fmt: skip
            yield f"{token.name} is changed once in each update, not for each {row.per.name}"
        if (
            value.producer_rule is ProducerRule.VERSION
            and row.per is Scope.RANK
            and token in row.needs
        ):
            for giver in rows:
                if token in giver.gives and giver.per is Scope.STAGE:
                    yield f"{token.name} comes of {giver.op.name}, one for each STAGE"
    if row.form is not None:
        yield from _of_form(row, rows, tokens)
    changed = [change.value for change in row.changes]
    for token in {*row.needs} - {*row.gives, *row.frees, *changed}:
        if tokens[token].producer_rule is ProducerRule.ONCE:
            yield f"it reads {token.name} without giving it: it could run after the value is freed"
    for token in changed:
        if changed.count(token) > 1:
            yield f"it has two changes of {token.name}: each is an instruction"
            return
    for change in row.changes:
        yield from _of_change(change, row, tokens)


def _of_form(row: Row, rows: Sequence[Row], tokens: Sequence[ValueRow]) -> Iterator[str]:
    """Faults of a row that changes the form of a value."""
    if row.needs != row.gives or len(row.gives) != 1 or tokens[row.gives[0]].peer is None:
        yield "a row with a form needs and gives one value that crosses between stages"
        return
    (token,) = row.gives
    handed = tokens[token].local_source
    others = (
        [value.value for value in tokens if value.local_source is token] if handed is None else []
    )
    changed = [one.gives for one in rows if one.form is row.form]
    if changed.count((token,)) > 1:
        yield f"{token.name} has several instructions that change this form"
    for other in others if handed is None else [handed]:
        if (other,) not in changed:
            yield f"no instruction changes this form of {other.name}, on the other side"


def _of_change(change: Change, row: Row, tokens: Sequence[ValueRow]) -> Iterator[str]:
    """Faults of a change."""
    token, before, after = change
    tiers = [state in TIERS for state in (before, after)]
    if token not in row.needs:
        yield f"it changes {token.name}, which it does not need"
    elif token not in row.gives and before != after:
        yield f"it changes {token.name}, and does not give it"
    if not (before and after) or tiers[0] != tiers[1]:
        yield f"{token.name} changes its tier, or its size, not {before!r} to {after!r}"
    if tokens[token].producer_rule not in _CHAINED:
        yield f"{token.name} has no states: it is found by {tokens[token].producer_rule.name}"
    if token in BOUNDARY and not all(tiers):
        yield f"{token.name} crosses between stages: its bytes change with a form, not in a change"
