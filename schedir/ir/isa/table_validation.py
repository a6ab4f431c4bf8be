"""Validate the rows of the tables in `instruction_table.py`.

Code that reads the tables would misread a row that breaks a rule, without an error.  So
`schedir/ir/dataflow.py` calls `require_tables` when it is imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields
from enum import IntEnum
from keyword import iskeyword
from typing import Final, get_args, get_type_hints

from schedir.ir.isa.instructions import (
    BOUNDARY_VALUES,
    FORMS,
    INSTRUCTIONS,
    LANES,
    OPTIMIZER_STEP_SIZES,
    TIERS,
    VALUES,
    Change,
    CollectiveRing,
    Form,
    FormRow,
    Lane,
    LaneRow,
    Opcode,
    PeerRule,
    ProducerRule,
    Row,
    Scope,
    Traffic,
    Value,
    ValueRow,
)
from schedir.ir.program import Program

# Group of a collective -> the scopes that its row may have.  With another scope, a rank could have
# several instructions of one collective.  The rank would then wait for itself, which is a deadlock.
_GROUP_SCOPES: Final = {
    "model": (Scope.RANK,),
    "stage_replicas": (Scope.STAGE, Scope.OCCURRENCE),
    "tied_weights": (Scope.STAGE,),
}
# Producer rules of values that instructions can change in place.
_CHAINED_RULES: Final = (ProducerRule.ONCE, ProducerRule.LATEST)
# Producer rules that choose the nearest earlier producer in the Stream.
_LATEST_RULES: Final = (ProducerRule.LATEST, ProducerRule.LATEST_OR_START)
# Attributes of programs that have a default.  A `ValueRow` can name only these.
_DEFAULTED_ATTRIBUTES: Final = {
    f.name for f in fields(Program) if f.metadata and f.default is not MISSING
}
# Producer rules of values that can have a size.  Such a value uses memory after an instruction has
# made it.
_LIFETIME_RULES: Final = (*_CHAINED_RULES, ProducerRule.ALL)
_SKIP_PEERS: Final = (PeerRule.SKIP_TO, PeerRule.SKIP_FROM)
_NEIGHBOR_SIZES: Final = {"activation", "activation_grad"}


class TableError(Exception):
    """A row of a table breaks a rule. The message names the row and the rule."""


def require_tables(
    rows: Sequence[Row] = INSTRUCTIONS,
    values: Sequence[ValueRow] = VALUES,
    lanes: Sequence[LaneRow] = LANES,
    forms: Sequence[FormRow] = FORMS,
) -> None:
    """Raise an error for the first row that breaks a rule.

    Args:
        rows: The table of instructions.
        values: The table of values.
        lanes: The table of lanes.
        forms: The table of forms.

    Raises:
        TableError: A row breaks a rule.
    """
    for fault in find_table_faults(rows, values, lanes, forms):
        raise TableError(fault)


def find_table_faults(
    rows: Sequence[Row],
    values: Sequence[ValueRow],
    lanes: Sequence[LaneRow],
    forms: Sequence[FormRow],
) -> Iterator[str]:
    """Yield the broken rules of the tables, row by row.

    Args:
        rows: The table of instructions.
        values: The table of values.
        lanes: The table of lanes.
        forms: The table of forms.

    Yields:
        A sentence with the name of the row.
    """
    yield from _find_order_faults(Form, [row.form for row in forms])
    yield from _find_order_faults(Opcode, [row.op for row in rows])
    yield from _find_order_faults(Value, [value.value for value in values])
    yield from _find_order_faults(Lane, [lane.lane for lane in lanes])
    for value in values:
        yield from _find_value_faults(value, rows)
    texts: dict[str, Row] = {}
    for row in rows:
        if texts.setdefault(row.text, row) is not row:
            yield f"{row.op.name}: it has the same text as {texts[row.text].op.name}, {row.text!r}"
        for fault in (
            *_find_row_faults(row, rows, lanes),
            *_find_price_faults(row, rows, values),
            *_find_value_use_faults(row, rows, values),
        ):
            yield f"{row.op.name}: {fault}"


def _find_order_faults(enum_type: type[IntEnum], members: Sequence[IntEnum]) -> Iterator[str]:
    """Yield a sentence for each row at a wrong index, and for each member without a row."""
    for index, member in enumerate(members):
        if member != index:
            yield f"{member.name} is number {member}, but its row is at index {index}"
    for member in [*enum_type][len(members) :]:
        yield f"{member.name} has no row"


def _find_value_faults(value: ValueRow, rows: Sequence[Row]) -> Iterator[str]:
    """Yield the rules that a row of the table of values breaks."""
    kind, name = value.value, value.value.name
    if value.local_source is None and not any(kind in row.gives for row in rows):
        yield f"{name}: no instruction gives it"
    if value.initial_tier:
        yield from _find_initial_tier_faults(value, rows)
    if value.producer_rule in _LATEST_RULES and value.scope is Scope.OCCURRENCE:
        yield f"{name}: a value that is made repeatedly must be one per stage"
    if value.producer_rule is ProducerRule.LATEST_OR_START and any(
        kind in row.frees for row in rows
    ):
        yield f"{name}: it exists at the start, so no instruction may free it"
    if value.program_attribute and value.program_attribute not in _DEFAULTED_ATTRIBUTES:
        yield f"{name}: programs have no attribute {value.program_attribute!r} with a default"
    if value.size and value.producer_rule not in _LIFETIME_RULES:
        rule = value.producer_rule.name
        valid_rules = ", ".join(valid_rule.name for valid_rule in _LIFETIME_RULES)
        yield f"{name}: a value with a size must have a producer rule of {valid_rules}, not {rule}"
    freers = [row for row in rows if kind in row.frees]
    if value.producer_rule is ProducerRule.ONCE and value.scope is Scope.MICROBATCH:
        if not freers:
            yield f"{name}: no instruction frees it, so its memory would not be counted"
        for row in freers:
            if len(freers) > 1 and not row.is_compute:
                yield f"{name}: {row.op.name} frees it, and other instructions free it, too"
    is_received = any(row.peer is not None and kind in row.gives for row in rows)
    if is_received and value.local_source is None:
        yield f"{name}: a value that is received needs a local_source, for stages on one rank"
    if value.size and value.scope is Scope.RANK:
        yield f"{name}: a size is given for each stage, not for each rank"
    if value.local_source is not None and value.peer is None:
        yield f"{name}: it passes between stages of a rank, but has no peer"
    if value.peer is not None and (value.scope is not Scope.MICROBATCH or not value.size):
        yield f"{name}: a value that crosses a boundary must be of a microbatch, and have a size"
    if value.converted_from is not None:
        for row in rows:
            if kind in {*row.gives} - {*row.needs} and value.converted_from[0] not in row.frees:
                yield f"{name}: {row.op.name} makes it, but does not free its source"


def _find_initial_tier_faults(value: ValueRow, rows: Sequence[Row]) -> Iterator[str]:
    """Yield the rules that the row of a value with an `initial_tier` breaks."""
    kind, name = value.value, value.value.name
    if value.initial_tier not in TIERS:
        yield f"{name}: its initial_tier must be {' or '.join(TIERS)}, not {value.initial_tier!r}"
    if value.producer_rule is not ProducerRule.LATEST:
        yield f"{name}: it exists at the start, so its producer rule must be LATEST"
    for row in rows:
        if (kind in row.gives and kind not in row.needs) or kind in row.frees:
            yield f"{name}: it exists at the start, but {row.op.name} makes or frees it"


def _find_row_faults(row: Row, rows: Sequence[Row], lanes: Sequence[LaneRow]) -> Iterator[str]:
    """Yield the rules that a row breaks in its text, lane, peer and group."""
    lane = lanes[row.lane]
    if not (row.text.isidentifier() and row.text.isascii()):
        yield f"its text must be one word, not {row.text!r}"
    if not {*row.frees} <= {*row.needs}:
        yield "it frees a value that it does not need"
    if row.is_compute and (row.lane is not Lane.COMPUTE or row.scope is not Scope.MICROBATCH):
        yield "a compute must be per microbatch, on the lane COMPUTE"
    if row.between_segments and (row.ring is None or row.ring.members not in ("tp", "ep")):
        yield (
            "a row between segments must be a collective of the tensor-parallel or the "
            "expert-parallel group"
        )
    if row.host_sync and lane.host_action != "starts":
        yield f"host_sync has no effect: hosts wait at lane {row.lane.name} anyway"
    if bool(row.peer) != lane.has_messages:
        yield "a row must have a peer if, and only if, its lane has messages"
    if row.peer:
        partner = rows[row.partner] if row.partner is not None else row
        if partner.partner is not row.op or partner.peer is not row.peer.opposite:
            yield "its partner must name it as partner, with the opposite peer"
        if row.scope is not Scope.MICROBATCH:
            yield "a message must be of a microbatch"
        if len(row.gives) + len(row.needs) != 1:
            yield "a message must need or give exactly one value"
        if row.peer in _SKIP_PEERS and row.cost not in ("", "send"):
            yield f"a cluster has no price for a message along a skip with the cost {row.cost!r}"
    elif row.partner not in (None, row.op):
        yield "without a peer, its partner must be its own opcode"
    elif row.partner is None and row.group:
        yield f"it has the group {row.group!r}, but no partner"
    elif row.partner is not None and row.scope not in _GROUP_SCOPES.get(row.group, ()):
        names = " or ".join(scope.name for scope in _GROUP_SCOPES.get(row.group, ()))
        yield f"its group is {row.group!r}, which needs {names or 'a group'}, not {row.scope.name}"


def _find_price_faults(row: Row, rows: Sequence[Row], values: Sequence[ValueRow]) -> Iterator[str]:
    """Yield the rules that a row breaks in the columns from which a `Cluster` computes costs."""
    ring, traffic = row.ring, row.traffic
    if row.cost and (not row.cost.isidentifier() or iskeyword(row.cost)):
        yield f"its cost must be a word that can be a field of Costs, not {row.cost!r}"
    if (ring is not None) + (traffic is not None) + (row.peer is not None) > 1:
        yield "only one of ring, traffic and peer can define its price"
    for other in rows:
        if row.cost and other.cost == row.cost and _get_price(other) != _get_price(row):
            yield (
                f"it has the cost {row.cost!r}, as {other.op.name} has, but another scope, ring, "
                "traffic or peer"
            )
    sizes = {values[kind].size for kind in {*row.needs, *row.gives}}
    known_sizes = {
        *(value.size for value in values),
        *OPTIMIZER_STEP_SIZES,
        *(change.before for any_row in rows for change in any_row.changes),
        *(change.after for any_row in rows for change in any_row.changes),
    } - {"", *TIERS}
    priced_sizes = [ring.size] if ring is not None else traffic.sizes if traffic is not None else ()
    for size in filter(None, priced_sizes):
        if size not in known_sizes:
            yield f"no value has the size {size!r}"
        elif row.scope is Scope.MICROBATCH and size not in sizes:
            yield f"it moves bytes of the size {size!r}, which none of its values has"
    if ring is not None and ring.members not in get_args(get_type_hints(CollectiveRing)["members"]):
        yield f"its ring has unknown members, {ring.members!r}"
    elif ring is not None and ring.size and ring.members == "ep":
        yield "a cluster has no price for a collective of the expert-parallel group on a size"
    elif ring is not None and not (ring.size or row.between_segments or row.form is not None):
        yield "a ring without a size needs a form, or a place between segments"
    if row.cost == "send" and row.peer not in _SKIP_PEERS and not sizes <= _NEIGHBOR_SIZES:
        yield "the cost 'send' is that of an activation or a gradient: give it a cost of its own"
    if traffic is None:
        return
    if traffic.link not in get_args(get_type_hints(Traffic)["link"]):
        yield f"its traffic uses an unknown link, {traffic.link!r}"
    if traffic.program_attribute not in ("", "checkpoint_snapshots", "optimizer_placement"):
        yield f"a cluster has no use for the attribute {traffic.program_attribute!r}"
    if not traffic.sizes and row.form is None:
        yield "traffic without sizes needs a form: its bytes are those of the changed value"
    if row.scope is Scope.RANK:
        yield "a cluster has no price for the traffic of a rank: make it one for each stage"


def _get_price(row: Row) -> tuple[object, ...]:
    """Return the columns that must be equal in all rows with the same cost."""
    return row.scope, row.ring, row.traffic, row.peer is not None


def _find_value_use_faults(
    row: Row, rows: Sequence[Row], values: Sequence[ValueRow]
) -> Iterator[str]:
    """Yield the rules that a row breaks in the values that it needs, gives and changes."""
    for kind in {*row.needs, *row.gives}:
        value = values[kind]
        rule = value.producer_rule
        if rule is ProducerRule.ONCE or (rule in _LATEST_RULES and value.scope is Scope.MICROBATCH):
            is_wrong_scope = row.scope is not value.scope
        elif rule in _LATEST_RULES or (rule is ProducerRule.ALL and value.size):
            is_wrong_scope = value.scope is Scope.STAGE and row.scope is Scope.RANK
        else:
            is_wrong_scope = False
        if is_wrong_scope:
            yield (
                f"{kind.name} is one for each {value.scope.name}, but the instruction is one "
                f"for each {row.scope.name}"
            )
        if row.peer and value.peer is not row.peer:
            yield f"{kind.name} and its message have different peers"
        if rule is not ProducerRule.VERSION:
            continue
        if kind in row.gives and row.scope not in (Scope.STAGE, Scope.RANK):
            yield f"{kind.name} is changed once in each update, not once for each {row.scope.name}"
        if kind in row.needs and row.scope is Scope.RANK:
            for giver in rows:
                if kind in giver.gives and giver.scope is Scope.STAGE:
                    yield (
                        f"{giver.op.name} gives {kind.name} once for each STAGE, but the "
                        "instruction is one for each RANK"
                    )
    if row.form is not None:
        yield from _find_form_faults(row, rows, values)
    changed = [change.value for change in row.changes]
    for kind in {*row.needs} - {*row.gives, *row.frees, *changed}:
        if values[kind].producer_rule is ProducerRule.ONCE:
            yield f"it reads {kind.name} without giving it: it could run after the value is freed"
    for kind in changed:
        if changed.count(kind) > 1:
            yield f"it has two changes of {kind.name}: each change needs its own instruction"
            return
    for change in row.changes:
        yield from _find_change_faults(change, row, values)


def _find_form_faults(row: Row, rows: Sequence[Row], values: Sequence[ValueRow]) -> Iterator[str]:
    """Yield the rules that a row with a `form` breaks."""
    if row.needs != row.gives or len(row.gives) != 1 or values[row.gives[0]].peer is None:
        yield "a row with a form must need and give one value that crosses between stages"
        return
    (kind,) = row.gives
    if values[kind].peer in _SKIP_PEERS:
        yield f"{kind.name} crosses along a skip: a cluster has no price for its forms"
    source = values[kind].local_source
    if source is None:
        counterparts = [value.value for value in values if value.local_source is kind]
    else:
        counterparts = [source]
    values_with_form = [candidate.gives for candidate in rows if candidate.form is row.form]
    if values_with_form.count((kind,)) > 1:
        yield f"{kind.name} has several instructions that change this form"
    for other in counterparts:
        if (other,) not in values_with_form:
            yield f"no instruction changes this form of {other.name}, at the other end"


def _find_change_faults(change: Change, row: Row, values: Sequence[ValueRow]) -> Iterator[str]:
    """Yield the rules that a `Change` in a row breaks."""
    kind, before, after = change
    is_tier_before, is_tier_after = before in TIERS, after in TIERS
    if kind not in row.needs:
        yield f"it changes {kind.name}, which it does not need"
    elif kind not in row.gives and before != after:
        yield f"it changes {kind.name}, but does not give it"
    if not (before and after) or is_tier_before != is_tier_after:
        yield (
            f"{kind.name} must change from tier to tier or from size to size, not from {before!r} "
            f"to {after!r}"
        )
    if values[kind].producer_rule not in _CHAINED_RULES:
        yield f"{kind.name} has no states: its producer rule is {values[kind].producer_rule.name}"
    if kind in BOUNDARY_VALUES and not (is_tier_before and is_tier_after):
        yield f"{kind.name} crosses between stages: a form, not a change, must change its bytes"
