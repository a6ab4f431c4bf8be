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


def row(op: Opcode, **other: Any) -> list[Row]:
    """Return the table with one changed row."""
    return [each._replace(**other) if each.op is op else each for each in INSTRUCTIONS]


def value(token: Value, **other: Any) -> list[ValueRow]:
    return [each._replace(**other) if each.value is token else each for each in VALUES]


def test_the_tables_keep_to_the_rules() -> None:
    require_tables()


@pytest.mark.parametrize(
    ("who", "rows"),
    [
        # A message without a microbatch, or whose other side belongs to another message.
        ("SendAct", row(O.SendAct, scope=Scope.OCCURRENCE)),
        ("SendAct", row(O.SendAct, partner=O.RecvGrad)),
        ("SendAct", row(O.RecvAct, peer=PeerRule.NEXT)),
        ("SendAct", row(O.SendAct, peer=None)),
        ("SendAct", row(O.SendAct, lane=Lane.DP)),
        ("SendAct", row(O.SendAct, needs=(T.ACT_OUT, T.SAVED))),
        # A collective between stages of one rank, or without members.
        ("ReduceGrads", row(O.ReduceGrads, partner=O.ReduceGrads, group="model")),
        ("ReduceNorm", row(O.ReduceNorm, group="")),
        ("ReduceNorm", row(O.ReduceNorm, scope=Scope.OCCURRENCE)),
        ("ReduceNorm", row(O.ReduceNorm, partner=None)),
        ("ReduceNorm", row(O.ReduceNorm, partner=O.ReduceTied)),
        # Values whose address differs from that of the instruction that needs them.
        ("OptimizerStep", row(O.OptimizerStep, needs=(T.SAVED,))),
        ("Forward", row(O.Forward, scope=Scope.STAGE)),
        ("OptimizerStep", row(O.OptimizerStep, needs=(T.GRAD, T.UNSHARDED_PARAMS))),
        ("OptimizerStep", row(O.OptimizerStep, needs=(T.GRAD, T.WGRAD_BUFFER))),
        ("Backward", row(O.Backward, gives=(T.GRAD_OUT, T.WGRAD, T.PARAMS))),
        # Changes that would not be counted, or only in part.
        ("TPGatherAct", row(O.TPGatherAct, changes=(Change(T.SAVED, "device", "host"),))),
        ("Backward", row(O.Backward, changes=(Change(T.SAVED, "device", "host"),))),
        ("TPGatherAct", row(O.TPGatherAct, changes=(Change(T.ACT_IN, "device", "saved"),))),
        ("TPGatherAct", row(O.TPGatherAct, changes=(Change(T.ACT_IN, "activation", "saved"),))),
        ("TPGatherAct", row(O.TPGatherAct, changes=(Change(T.ACT_IN, "device", "host"),) * 2)),
        (
            "ReduceReplicatedStages",
            row(O.ReduceReplicatedStages, changes=(Change(T.GRAD, "device", "host"),)),
        ),
        # A message to another stage than its value.
        ("SendSkip", row(O.SendSkip, needs=(T.ACT_OUT,))),
        # Messages and forms that a cluster would price as free, or like an activation.
        ("SendSkip: a cluster has no price", row(O.SendSkip, cost="send_skip")),
        (
            "SKIP_OUT crosses along a skip",
            row(O.TPScatterAct, needs=(T.SKIP_OUT,), gives=(T.SKIP_OUT,), cost="", traffic=None),
        ),
        # A form without a second row, a form changed twice, and a form of a value that never moves.
        ("TPGatherAct", row(O.TPScatterAct, form=None, cost="", traffic=None)),
        ("TPScatterAct", row(O.TPGatherAct, form=None)),
        ("TPGatherAct: ACT_IN has several", row(O.TPReduceAct, form=Form.TP_SHARD)),
        ("Offload", row(O.Offload, form=Form.TP_SHARD)),
        # A row that reads a value, without an order before the row that frees it.
        ("TPReduceAct: it reads ACT_IN", row(O.TPReduceAct, gives=())),
        # Collectives of another group between segments, and a reduction that computes.
        ("ReduceGrads", row(O.ReduceGrads, between_segments="always")),
        ("ReduceGrads", row(O.ReduceGrads, is_compute=True)),
        (
            "Snapshot",
            row(O.Snapshot, traffic=Traffic("host", ("params",), program_attribute="snapshot")),
        ),
        ("Snapshot", row(O.Snapshot, traffic=Traffic("host"))),
        # Prices that a cluster would compute from wrong bytes, or not at all.
        (
            "Recompute: only one of ring, traffic and peer",
            row(
                O.Recompute, ring=CollectiveRing("tp", "saved"), traffic=Traffic("hbm", ("saved",))
            ),
        ),
        (
            "ReloadState: it has the cost 'offload_state'",
            row(O.ReloadState, cost="offload_state", traffic=Traffic("disk", ("optimizer",))),
        ),
        ("Forward: it has the cost 'step'", row(O.Forward, cost="step")),
        ("Offload: its cost must be a word", row(O.Offload, cost="class")),
        (
            "Recompute: no value has the size 'save'",
            row(O.Recompute, traffic=Traffic("hbm", ("save",))),
        ),
        (
            "Recompute: it moves bytes of the size 'skip'",
            row(O.Recompute, traffic=Traffic("hbm", ("skip",))),
        ),
        (
            "Recompute: its traffic uses an unknown link",
            row(O.Recompute, traffic=Traffic(cast(Any, "pcie"), ("saved",))),
        ),
        (
            "OptimizerStep: a cluster has no price for the traffic of a rank",
            row(O.OptimizerStep, traffic=Traffic("hbm", ("params",))),
        ),
        (
            "ReduceTied: its ring has unknown members",
            row(O.ReduceTied, ring=CollectiveRing(cast(Any, "cp"), "grads")),
        ),
        (
            "ReduceTied: a cluster has no price for a collective of the expert",
            row(O.ReduceTied, ring=CollectiveRing("ep", "grads")),
        ),
        ("ReduceTied: a ring without a size", row(O.ReduceTied, ring=CollectiveRing("dp"))),
        # Values that two instructions would free, or that none would.
        ("SAVED: Offload frees it, and other", row(O.Offload, frees=(T.SAVED,))),
        ("SKIP_OUT: no instruction frees it", row(O.SendSkip, frees=())),
        # Other rows.
        ("BackwardWeight", row(O.BackwardWeight, needs=())),
        ("Backward", row(O.Backward, text="F")),
        ("Backward", row(O.Backward, text="b 1")),
        ("TPGatherAct", row(O.TPGatherAct, host_sync="always")),
        ("Backward", [INSTRUCTIONS[0], INSTRUCTIONS[2], INSTRUCTIONS[1], *INSTRUCTIONS[3:]]),
        ([*O][-1].name, [*INSTRUCTIONS[:-1]]),
    ],
)
def test_rows_that_cannot_be_read(who: str, rows: list[Row]) -> None:
    with pytest.raises(TableError, match=who):
        require_tables(rows)


@pytest.mark.parametrize(
    ("who", "tokens"),
    [
        ("SendAct: the cost 'send' is that of", value(T.ACT_OUT, size="saved")),
        ("ACT_IN: a value that is received needs", value(T.ACT_IN, local_source=None)),
        ("GRAD", value(T.GRAD, size="gradients")),
        ("NORM", value(T.NORM, size="norm")),
        ("NORM", value(T.NORM, producer_rule=ProducerRule.LATEST, size="norm")),
        ("SAVED", value(T.SAVED, local_source=T.ACT_OUT)),
        ("SKIP_OUT", value(T.SKIP_OUT, size="")),
        (
            "DEFERRED_WGRAD",
            value(T.DEFERRED_WGRAD, converted_from=(T.ACT_OUT, "saved_and_deferred")),
        ),
        ("WGRAD", value(T.WGRAD, scope=Scope.OCCURRENCE, producer_rule=ProducerRule.LATEST)),
        ("WGRAD_BUFFER", value(T.WGRAD_BUFFER, scope=Scope.OCCURRENCE)),
        ("WGRAD_BUFFER", value(T.WGRAD_BUFFER, scope=Scope.MICROBATCH)),
        ("WGRAD_BUFFER", value(T.WGRAD_BUFFER, size="params")),
        ("WGRAD_BUFFER", value(T.WGRAD_BUFFER, program_attribute="room")),
        ("WGRAD_BUFFER", value(T.WGRAD_BUFFER, program_attribute="plan")),
        ("SHARDED_PARAMS", value(T.SHARDED_PARAMS, producer_rule=ProducerRule.LATEST_OR_START)),
        (
            "WGRAD: it exists at the start",
            value(T.WGRAD, producer_rule=ProducerRule.LATEST_OR_START),
        ),
        ("GRAD", value(T.GRAD, producer_rule=ProducerRule.ONCE)),
        ("GRAD", value(T.GRAD, producer_rule=ProducerRule.LATEST)),
        ([*T][-1].name, [*VALUES[:-1]]),
    ],
)
def test_values_that_cannot_be_read(who: str, tokens: list[ValueRow]) -> None:
    with pytest.raises(TableError, match=who):
        require_tables(values=tokens)


def test_values_that_nobody_gives() -> None:
    with pytest.raises(TableError, match="DEFERRED_WGRAD: no instruction gives it"):
        require_tables(row(O.BackwardInput, gives=(T.GRAD_OUT, T.WGRAD)))


def test_forms_without_a_row() -> None:
    with pytest.raises(TableError, match=f"{[*Form][-1].name} has no row"):
        require_tables(forms=FORMS[:-1])


def test_the_stub_of_costs_is_that_of_the_table() -> None:
    assert STUB_PATH.read_text() == make_stub(), "python -m schedir.ir.cost.cost_fields writes it"


def test_lanes_without_a_row() -> None:
    with pytest.raises(TableError, match=f"{[*Lane][-1].name} has no row"):
        require_tables(lanes=LANES[:-1])


def test_parts_exist_between_a_split_and_its_gather() -> None:
    split = {
        kind: [row.op for row in INSTRUCTIONS if kind in {*row.needs, *row.gives}
               and is_tp_split(row.op, kind)]
        for kind in T
    }  # fmt: skip
    assert {kind: ops for kind, ops in split.items() if ops} == {
        T.ACT_OUT: [O.SendAct], T.ACT_IN: [O.RecvAct, O.TPGatherAct],
        T.GRAD_OUT: [O.SendGrad], T.GRAD_IN: [O.RecvGrad, O.TPGatherGrad],
    }  # fmt: skip
