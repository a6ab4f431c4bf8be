"""Tests that inconsistent rows of the tables are refused at import."""

from __future__ import annotations

from typing import Any, cast

import pytest

from schedir.ir.cost.cost_fields import STUB_PATH, make_stub
from schedir.ir.isa.instructions import (
    FORMS,
    INSTRUCTIONS,
    LANES,
    VALUES,
    Change,
    CollectiveRing,
    Form,
    Lane,
    Opcode,
    PeerRule,
    ProducerRule,
    Row,
    Scope,
    Traffic,
    Value,
    ValueRow,
    is_tp_split,
)
from schedir.ir.isa.table_validation import TableError, require_tables

O, T = Opcode, Value


def change_instruction_row(op: Opcode, **changes: Any) -> list[Row]:
    """Return the table with one changed row."""
    return [
        instruction_row._replace(**changes) if instruction_row.op is op else instruction_row
        for instruction_row in INSTRUCTIONS
    ]


def make_instruction_case(op: Opcode, message: str = "", **changes: Any) -> tuple[str, list[Row]]:
    """Return the message that refuses a changed row, by default its name, and the table."""
    return message or op.name, change_instruction_row(op, **changes)


def make_value_case(value: Value, message: str = "", **changes: Any) -> tuple[str, list[ValueRow]]:
    rows = [row._replace(**changes) if row.value is value else row for row in VALUES]
    return message or value.name, rows


def test_tables_follow_rules() -> None:
    require_tables()


@pytest.mark.parametrize(
    ("message", "rows"),
    [
        # A message without a microbatch, or whose other side belongs to another message.
        make_instruction_case(O.SendAct, scope=Scope.OCCURRENCE),
        make_instruction_case(O.SendAct, partner=O.RecvGrad),
        make_instruction_case(O.RecvAct, "SendAct", peer=PeerRule.NEXT),
        make_instruction_case(O.SendAct, peer=None),
        make_instruction_case(O.SendAct, lane=Lane.DP),
        make_instruction_case(O.SendAct, needs=(T.ACT_OUT, T.SAVED)),
        # A collective between stages of one rank, or without members.
        make_instruction_case(O.ReduceGrads, partner=O.ReduceGrads, group="model"),
        make_instruction_case(O.ReduceNorm, group=""),
        make_instruction_case(O.ReduceNorm, scope=Scope.OCCURRENCE),
        make_instruction_case(O.ReduceNorm, partner=None),
        make_instruction_case(O.ReduceNorm, partner=O.ReduceTied),
        # Values whose address differs from that of the instruction that needs them.
        make_instruction_case(O.OptimizerStep, needs=(T.SAVED,)),
        make_instruction_case(O.Forward, scope=Scope.STAGE),
        make_instruction_case(O.OptimizerStep, needs=(T.GRAD, T.UNSHARDED_PARAMS)),
        make_instruction_case(O.OptimizerStep, needs=(T.GRAD, T.WGRAD_BUFFER)),
        make_instruction_case(O.Backward, gives=(T.GRAD_OUT, T.WGRAD, T.PARAMS)),
        # Changes that would not be counted, or only in part.
        make_instruction_case(O.TPGatherAct, changes=(Change(T.SAVED, "device", "host"),)),
        make_instruction_case(O.Backward, changes=(Change(T.SAVED, "device", "host"),)),
        make_instruction_case(O.TPGatherAct, changes=(Change(T.ACT_IN, "device", "saved"),)),
        make_instruction_case(O.TPGatherAct, changes=(Change(T.ACT_IN, "activation", "saved"),)),
        make_instruction_case(O.TPGatherAct, changes=(Change(T.ACT_IN, "device", "host"),) * 2),
        make_instruction_case(
            O.ReduceReplicatedStages, changes=(Change(T.GRAD, "device", "host"),)
        ),
        # A message to another stage than its value.
        make_instruction_case(O.SendSkip, needs=(T.ACT_OUT,)),
        # Messages and forms that a cluster would price as free, or like an activation.
        make_instruction_case(O.SendSkip, "SendSkip: a cluster has no price", cost="send_skip"),
        make_instruction_case(
            O.TPScatterAct,
            "SKIP_OUT crosses along a skip",
            needs=(T.SKIP_OUT,),
            gives=(T.SKIP_OUT,),
            cost="",
            traffic=None,
        ),
        # A form without a second row, a form changed twice, and a form of a value that never moves.
        make_instruction_case(O.TPScatterAct, "TPGatherAct", form=None, cost="", traffic=None),
        make_instruction_case(O.TPGatherAct, "TPScatterAct", form=None),
        make_instruction_case(O.TPReduceAct, "TPGatherAct: ACT_IN has several", form=Form.TP_SHARD),
        make_instruction_case(O.Offload, form=Form.TP_SHARD),
        # A row that reads a value, without an order before the row that frees it.
        make_instruction_case(O.TPReduceAct, "TPReduceAct: it reads ACT_IN", gives=()),
        # Collectives of another group between segments, and a reduction that computes.
        make_instruction_case(O.ReduceGrads, between_segments="always"),
        make_instruction_case(O.ReduceGrads, is_compute=True),
        make_instruction_case(
            O.Snapshot, traffic=Traffic("host", ("params",), program_attribute="snapshot")
        ),
        make_instruction_case(O.Snapshot, traffic=Traffic("host")),
        # Prices that a cluster would compute from wrong bytes, or not at all.
        make_instruction_case(
            O.Recompute,
            "Recompute: only one of ring, traffic and peer",
            ring=CollectiveRing("tp", "saved"),
            traffic=Traffic("hbm", ("saved",)),
        ),
        make_instruction_case(
            O.ReloadState,
            "ReloadState: it has the cost 'offload_state'",
            cost="offload_state",
            traffic=Traffic("disk", ("optimizer",)),
        ),
        make_instruction_case(O.Forward, "Forward: it has the cost 'step'", cost="step"),
        make_instruction_case(O.Offload, "Offload: its cost must be a word", cost="class"),
        make_instruction_case(
            O.Recompute,
            "Recompute: no value has the size 'save'",
            traffic=Traffic("hbm", ("save",)),
        ),
        make_instruction_case(
            O.Recompute,
            "Recompute: it moves bytes of the size 'skip'",
            traffic=Traffic("hbm", ("skip",)),
        ),
        make_instruction_case(
            O.Recompute,
            "Recompute: its traffic uses an unknown link",
            traffic=Traffic(cast(Any, "pcie"), ("saved",)),
        ),
        make_instruction_case(
            O.OptimizerStep,
            "OptimizerStep: a cluster has no price for the traffic of a rank",
            traffic=Traffic("hbm", ("params",)),
        ),
        make_instruction_case(
            O.ReduceTied,
            "ReduceTied: its ring has unknown members",
            ring=CollectiveRing(cast(Any, "cp"), "grads"),
        ),
        make_instruction_case(
            O.ReduceTied,
            "ReduceTied: a cluster has no price for a collective of the expert",
            ring=CollectiveRing("ep", "grads"),
        ),
        make_instruction_case(
            O.ReduceTied, "ReduceTied: a ring without a size", ring=CollectiveRing("dp")
        ),
        # Values that two instructions would free, or that none would.
        make_instruction_case(O.Offload, "SAVED: Offload frees it, and other", frees=(T.SAVED,)),
        make_instruction_case(O.SendSkip, "SKIP_OUT: no instruction frees it", frees=()),
        # Other rows.
        make_instruction_case(O.BackwardWeight, needs=()),
        make_instruction_case(O.Backward, text="F"),
        make_instruction_case(O.Backward, text="b 1"),
        make_instruction_case(O.TPGatherAct, host_sync="always"),
        ("Backward", [INSTRUCTIONS[0], INSTRUCTIONS[2], INSTRUCTIONS[1], *INSTRUCTIONS[3:]]),
        ([*O][-1].name, [*INSTRUCTIONS[:-1]]),
    ],
)
def test_inconsistent_instruction_row_is_refused(message: str, rows: list[Row]) -> None:
    with pytest.raises(TableError, match=message):
        require_tables(rows)


@pytest.mark.parametrize(
    ("message", "tokens"),
    [
        make_value_case(T.ACT_OUT, "SendAct: the cost 'send' is that of", size="saved"),
        make_value_case(T.ACT_IN, "ACT_IN: a value that is received needs", local_source=None),
        make_value_case(T.GRAD, size="gradients"),
        make_value_case(T.NORM, size="norm"),
        make_value_case(T.NORM, producer_rule=ProducerRule.LATEST, size="norm"),
        make_value_case(T.SAVED, local_source=T.ACT_OUT),
        make_value_case(T.SKIP_OUT, size=""),
        make_value_case(T.DEFERRED_WGRAD, converted_from=(T.ACT_OUT, "saved_and_deferred")),
        make_value_case(T.WGRAD, scope=Scope.OCCURRENCE, producer_rule=ProducerRule.LATEST),
        make_value_case(T.WGRAD_BUFFER, scope=Scope.OCCURRENCE),
        make_value_case(T.WGRAD_BUFFER, scope=Scope.MICROBATCH),
        make_value_case(T.WGRAD_BUFFER, size="params"),
        make_value_case(T.WGRAD_BUFFER, program_attribute="room"),
        make_value_case(T.WGRAD_BUFFER, program_attribute="plan"),
        make_value_case(T.SHARDED_PARAMS, producer_rule=ProducerRule.LATEST_OR_START),
        make_value_case(
            T.WGRAD, "WGRAD: it exists at the start", producer_rule=ProducerRule.LATEST_OR_START
        ),
        make_value_case(T.GRAD, producer_rule=ProducerRule.ONCE),
        make_value_case(T.GRAD, producer_rule=ProducerRule.LATEST),
        ([*T][-1].name, [*VALUES[:-1]]),
    ],
)
def test_inconsistent_value_row_is_refused(message: str, tokens: list[ValueRow]) -> None:
    with pytest.raises(TableError, match=message):
        require_tables(values=tokens)


def test_value_without_producer_is_refused() -> None:
    with pytest.raises(TableError, match="DEFERRED_WGRAD: no instruction gives it"):
        require_tables(change_instruction_row(O.BackwardInput, gives=(T.GRAD_OUT, T.WGRAD)))


def test_form_without_row_is_refused() -> None:
    with pytest.raises(TableError, match=f"{[*Form][-1].name} has no row"):
        require_tables(forms=FORMS[:-1])


def test_costs_stub_matches_table() -> None:
    assert STUB_PATH.read_text() == make_stub(), "python -m schedir.ir.cost.cost_fields writes it"


def test_lane_without_row_is_refused() -> None:
    with pytest.raises(TableError, match=f"{[*Lane][-1].name} has no row"):
        require_tables(lanes=LANES[:-1])


def test_split_values_exist_between_scatter_and_gather() -> None:
    split = {
        kind: [row.op for row in INSTRUCTIONS if kind in {*row.needs, *row.gives}
               and is_tp_split(row.op, kind)]
        for kind in T
    }  # fmt: skip
    assert {kind: ops for kind, ops in split.items() if ops} == {
        T.ACT_OUT: [O.SendAct], T.ACT_IN: [O.RecvAct, O.TPGatherAct],
        T.GRAD_OUT: [O.SendGrad], T.GRAD_IN: [O.RecvGrad, O.TPGatherGrad],
    }  # fmt: skip
