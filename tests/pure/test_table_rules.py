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


def change_value_row(token: Value, **changes: Any) -> list[ValueRow]:
    return [
        value_row._replace(**changes) if value_row.value is token else value_row
        for value_row in VALUES
    ]


def test_tables_follow_rules() -> None:
    require_tables()


@pytest.mark.parametrize(
    ("message", "rows"),
    [
        # A message without a microbatch, or whose other side belongs to another message.
        ("SendAct", change_instruction_row(O.SendAct, scope=Scope.OCCURRENCE)),
        ("SendAct", change_instruction_row(O.SendAct, partner=O.RecvGrad)),
        ("SendAct", change_instruction_row(O.RecvAct, peer=PeerRule.NEXT)),
        ("SendAct", change_instruction_row(O.SendAct, peer=None)),
        ("SendAct", change_instruction_row(O.SendAct, lane=Lane.DP)),
        ("SendAct", change_instruction_row(O.SendAct, needs=(T.ACT_OUT, T.SAVED))),
        # A collective between stages of one rank, or without members.
        (
            "ReduceGrads",
            change_instruction_row(O.ReduceGrads, partner=O.ReduceGrads, group="model"),
        ),
        ("ReduceNorm", change_instruction_row(O.ReduceNorm, group="")),
        ("ReduceNorm", change_instruction_row(O.ReduceNorm, scope=Scope.OCCURRENCE)),
        ("ReduceNorm", change_instruction_row(O.ReduceNorm, partner=None)),
        ("ReduceNorm", change_instruction_row(O.ReduceNorm, partner=O.ReduceTied)),
        # Values whose address differs from that of the instruction that needs them.
        ("OptimizerStep", change_instruction_row(O.OptimizerStep, needs=(T.SAVED,))),
        ("Forward", change_instruction_row(O.Forward, scope=Scope.STAGE)),
        (
            "OptimizerStep",
            change_instruction_row(O.OptimizerStep, needs=(T.GRAD, T.UNSHARDED_PARAMS)),
        ),
        ("OptimizerStep", change_instruction_row(O.OptimizerStep, needs=(T.GRAD, T.WGRAD_BUFFER))),
        ("Backward", change_instruction_row(O.Backward, gives=(T.GRAD_OUT, T.WGRAD, T.PARAMS))),
        # Changes that would not be counted, or only in part.
        (
            "TPGatherAct",
            change_instruction_row(O.TPGatherAct, changes=(Change(T.SAVED, "device", "host"),)),
        ),
        (
            "Backward",
            change_instruction_row(O.Backward, changes=(Change(T.SAVED, "device", "host"),)),
        ),
        (
            "TPGatherAct",
            change_instruction_row(O.TPGatherAct, changes=(Change(T.ACT_IN, "device", "saved"),)),
        ),
        (
            "TPGatherAct",
            change_instruction_row(
                O.TPGatherAct, changes=(Change(T.ACT_IN, "activation", "saved"),)
            ),
        ),
        (
            "TPGatherAct",
            change_instruction_row(
                O.TPGatherAct, changes=(Change(T.ACT_IN, "device", "host"),) * 2
            ),
        ),
        (
            "ReduceReplicatedStages",
            change_instruction_row(
                O.ReduceReplicatedStages, changes=(Change(T.GRAD, "device", "host"),)
            ),
        ),
        # A message to another stage than its value.
        ("SendSkip", change_instruction_row(O.SendSkip, needs=(T.ACT_OUT,))),
        # Messages and forms that a cluster would price as free, or like an activation.
        ("SendSkip: a cluster has no price", change_instruction_row(O.SendSkip, cost="send_skip")),
        (
            "SKIP_OUT crosses along a skip",
            change_instruction_row(
                O.TPScatterAct, needs=(T.SKIP_OUT,), gives=(T.SKIP_OUT,), cost="", traffic=None
            ),
        ),
        # A form without a second row, a form changed twice, and a form of a value that never moves.
        ("TPGatherAct", change_instruction_row(O.TPScatterAct, form=None, cost="", traffic=None)),
        ("TPScatterAct", change_instruction_row(O.TPGatherAct, form=None)),
        (
            "TPGatherAct: ACT_IN has several",
            change_instruction_row(O.TPReduceAct, form=Form.TP_SHARD),
        ),
        ("Offload", change_instruction_row(O.Offload, form=Form.TP_SHARD)),
        # A row that reads a value, without an order before the row that frees it.
        ("TPReduceAct: it reads ACT_IN", change_instruction_row(O.TPReduceAct, gives=())),
        # Collectives of another group between segments, and a reduction that computes.
        ("ReduceGrads", change_instruction_row(O.ReduceGrads, between_segments="always")),
        ("ReduceGrads", change_instruction_row(O.ReduceGrads, is_compute=True)),
        (
            "Snapshot",
            change_instruction_row(
                O.Snapshot, traffic=Traffic("host", ("params",), program_attribute="snapshot")
            ),
        ),
        ("Snapshot", change_instruction_row(O.Snapshot, traffic=Traffic("host"))),
        # Prices that a cluster would compute from wrong bytes, or not at all.
        (
            "Recompute: only one of ring, traffic and peer",
            change_instruction_row(
                O.Recompute, ring=CollectiveRing("tp", "saved"), traffic=Traffic("hbm", ("saved",))
            ),
        ),
        (
            "ReloadState: it has the cost 'offload_state'",
            change_instruction_row(
                O.ReloadState, cost="offload_state", traffic=Traffic("disk", ("optimizer",))
            ),
        ),
        ("Forward: it has the cost 'step'", change_instruction_row(O.Forward, cost="step")),
        ("Offload: its cost must be a word", change_instruction_row(O.Offload, cost="class")),
        (
            "Recompute: no value has the size 'save'",
            change_instruction_row(O.Recompute, traffic=Traffic("hbm", ("save",))),
        ),
        (
            "Recompute: it moves bytes of the size 'skip'",
            change_instruction_row(O.Recompute, traffic=Traffic("hbm", ("skip",))),
        ),
        (
            "Recompute: its traffic uses an unknown link",
            change_instruction_row(O.Recompute, traffic=Traffic(cast(Any, "pcie"), ("saved",))),
        ),
        (
            "OptimizerStep: a cluster has no price for the traffic of a rank",
            change_instruction_row(O.OptimizerStep, traffic=Traffic("hbm", ("params",))),
        ),
        (
            "ReduceTied: its ring has unknown members",
            change_instruction_row(O.ReduceTied, ring=CollectiveRing(cast(Any, "cp"), "grads")),
        ),
        (
            "ReduceTied: a cluster has no price for a collective of the expert",
            change_instruction_row(O.ReduceTied, ring=CollectiveRing("ep", "grads")),
        ),
        (
            "ReduceTied: a ring without a size",
            change_instruction_row(O.ReduceTied, ring=CollectiveRing("dp")),
        ),
        # Values that two instructions would free, or that none would.
        ("SAVED: Offload frees it, and other", change_instruction_row(O.Offload, frees=(T.SAVED,))),
        ("SKIP_OUT: no instruction frees it", change_instruction_row(O.SendSkip, frees=())),
        # Other rows.
        ("BackwardWeight", change_instruction_row(O.BackwardWeight, needs=())),
        ("Backward", change_instruction_row(O.Backward, text="F")),
        ("Backward", change_instruction_row(O.Backward, text="b 1")),
        ("TPGatherAct", change_instruction_row(O.TPGatherAct, host_sync="always")),
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
        ("SendAct: the cost 'send' is that of", change_value_row(T.ACT_OUT, size="saved")),
        ("ACT_IN: a value that is received needs", change_value_row(T.ACT_IN, local_source=None)),
        ("GRAD", change_value_row(T.GRAD, size="gradients")),
        ("NORM", change_value_row(T.NORM, size="norm")),
        ("NORM", change_value_row(T.NORM, producer_rule=ProducerRule.LATEST, size="norm")),
        ("SAVED", change_value_row(T.SAVED, local_source=T.ACT_OUT)),
        ("SKIP_OUT", change_value_row(T.SKIP_OUT, size="")),
        (
            "DEFERRED_WGRAD",
            change_value_row(T.DEFERRED_WGRAD, converted_from=(T.ACT_OUT, "saved_and_deferred")),
        ),
        (
            "WGRAD",
            change_value_row(T.WGRAD, scope=Scope.OCCURRENCE, producer_rule=ProducerRule.LATEST),
        ),
        ("WGRAD_BUFFER", change_value_row(T.WGRAD_BUFFER, scope=Scope.OCCURRENCE)),
        ("WGRAD_BUFFER", change_value_row(T.WGRAD_BUFFER, scope=Scope.MICROBATCH)),
        ("WGRAD_BUFFER", change_value_row(T.WGRAD_BUFFER, size="params")),
        ("WGRAD_BUFFER", change_value_row(T.WGRAD_BUFFER, program_attribute="room")),
        ("WGRAD_BUFFER", change_value_row(T.WGRAD_BUFFER, program_attribute="plan")),
        (
            "SHARDED_PARAMS",
            change_value_row(T.SHARDED_PARAMS, producer_rule=ProducerRule.LATEST_OR_START),
        ),
        (
            "WGRAD: it exists at the start",
            change_value_row(T.WGRAD, producer_rule=ProducerRule.LATEST_OR_START),
        ),
        ("GRAD", change_value_row(T.GRAD, producer_rule=ProducerRule.ONCE)),
        ("GRAD", change_value_row(T.GRAD, producer_rule=ProducerRule.LATEST)),
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
