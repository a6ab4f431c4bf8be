"""Rows of the tables that would be read as something else are refused when they are imported."""

from __future__ import annotations

from typing import Any

import pytest

from schedir.ir.cost.cost_fields import STUB, stub
from schedir.ir.isa.instructions import (
    FORMS,
    LANES,
    ROWS,
    TOKENS,
    Change,
    Form,
    Lane,
    Opcode,
    PeerRule,
    ProducerRule,
    Row,
    Scope,
    Token,
    TokenRow,
    Traffic,
)
from schedir.ir.isa.table_validation import TableError, require_tables

O, T = Opcode, Token


def row(op: Opcode, **other: Any) -> list[Row]:
    """The table with one row changed."""
    return [each._replace(**other) if each.op is op else each for each in ROWS]


def value(token: Token, **other: Any) -> list[TokenRow]:
    return [each._replace(**other) if each.token is token else each for each in TOKENS]


def test_the_tables_keep_to_the_rules() -> None:
    require_tables()


@pytest.mark.parametrize(
    ("who", "rows"),
    [
        # A message that is not of a microbatch, or whose other side is another's.
        ("SendAct", row(O.SendAct, per=Scope.TURN)),
        ("SendAct", row(O.SendAct, meets=O.RecvGrad)),
        ("SendAct", row(O.RecvAct, hop=PeerRule.NEXT)),
        ("SendAct", row(O.SendAct, hop=None)),
        ("SendAct", row(O.SendAct, lane=Lane.DP)),
        ("SendAct", row(O.SendAct, needs=(T.ACT_OUT, T.SAVED))),
        # A collective of several stages of one rank, or of nobody.
        ("ReduceGrads", row(O.ReduceGrads, meets=O.ReduceGrads, group="model")),
        ("ReduceNorm", row(O.ReduceNorm, group="")),
        ("ReduceNorm", row(O.ReduceNorm, per=Scope.TURN)),
        ("ReduceNorm", row(O.ReduceNorm, meets=None)),
        ("ReduceNorm", row(O.ReduceNorm, meets=O.ReduceTied)),
        # Values that are found by another address than that of who needs them.
        ("OptimizerStep", row(O.OptimizerStep, needs=(T.SAVED,))),
        ("Forward", row(O.Forward, per=Scope.STAGE)),
        ("OptimizerStep", row(O.OptimizerStep, needs=(T.GRAD, T.FULL))),
        ("OptimizerStep", row(O.OptimizerStep, needs=(T.GRAD, T.ROOM))),
        ("Backward", row(O.Backward, gives=(T.GRAD_OUT, T.WGRAD, T.PARAMETERS))),
        # Changes that nobody would see, or only half.
        ("Gather", row(O.Gather, changes=(Change(T.SAVED, "device", "host"),))),
        ("Backward", row(O.Backward, changes=(Change(T.SAVED, "device", "host"),))),
        ("Gather", row(O.Gather, changes=(Change(T.ACT_IN, "device", "saved"),))),
        ("Gather", row(O.Gather, changes=(Change(T.ACT_IN, "activation", "saved"),))),
        ("Gather", row(O.Gather, changes=(Change(T.ACT_IN, "device", "host"),) * 2)),
        (
            "ReduceHolders",
            row(O.ReduceHolders, changes=(Change(T.GRAD, "device", "host"),)),
        ),
        # A message that goes elsewhere than its value.
        ("SendSkip", row(O.SendSkip, needs=(T.ACT_OUT,))),
        # A form without a second row, a form changed twice, and a form of a value that stays.
        ("Gather", row(O.Scatter, form=None, traffic=None)),
        ("Scatter", row(O.Gather, form=None)),
        ("Gather: ACT_IN has several", row(O.SumAct, form=Form.PART)),
        ("Offload", row(O.Offload, form=Form.PART)),
        # A row that reads a value, and that no row orders before the one that frees it.
        ("SumAct: it reads ACT_IN", row(O.SumAct, gives=())),
        # Collectives of another group between segments, and a reduction that computes.
        ("ReduceGrads", row(O.ReduceGrads, between_segments="always")),
        ("ReduceGrads", row(O.ReduceGrads, computes=True)),
        ("Snapshot", row(O.Snapshot, traffic=Traffic("host", ("params",), trait="snapshot"))),
        ("Snapshot", row(O.Snapshot, traffic=Traffic("host"))),
        # And the rest.
        ("BackwardWeight", row(O.BackwardWeight, needs=())),
        ("Backward", row(O.Backward, text="F")),
        ("Backward", row(O.Backward, text="b 1")),
        ("Gather", row(O.Gather, drains="always")),
        ("Backward", [ROWS[0], ROWS[2], ROWS[1], *ROWS[3:]]),
        ([*O][-1].name, [*ROWS[:-1]]),
    ],
)
def test_rows_that_cannot_be_read(who: str, rows: list[Row]) -> None:
    with pytest.raises(TableError, match=who):
        require_tables(rows)


@pytest.mark.parametrize(
    ("who", "tokens"),
    [
        ("GRAD", value(T.GRAD, size="gradients")),
        ("NORM", value(T.NORM, size="norm")),
        ("NORM", value(T.NORM, found=ProducerRule.AGAIN, size="norm")),
        ("SAVED", value(T.SAVED, handed=T.ACT_OUT)),
        ("SKIP_OUT", value(T.SKIP_OUT, size="")),
        ("TAPE", value(T.TAPE, made_of=(T.ACT_OUT, "both"))),
        ("WGRAD", value(T.WGRAD, per=Scope.TURN, found=ProducerRule.AGAIN)),
        ("ROOM", value(T.ROOM, per=Scope.TURN)),
        ("ROOM", value(T.ROOM, per=Scope.MICROBATCH)),
        ("ROOM", value(T.ROOM, size="params")),
        ("ROOM", value(T.ROOM, trait="room")),
        ("ROOM", value(T.ROOM, trait="plan")),
        ("PARTS", value(T.PARTS, found=ProducerRule.SINCE)),
        ("WGRAD: it is there", value(T.WGRAD, found=ProducerRule.SINCE)),
        ("GRAD", value(T.GRAD, found=ProducerRule.ONCE)),
        ("GRAD", value(T.GRAD, found=ProducerRule.AGAIN)),
        ([*T][-1].name, [*TOKENS[:-1]]),
    ],
)
def test_values_that_cannot_be_read(who: str, tokens: list[TokenRow]) -> None:
    with pytest.raises(TableError, match=who):
        require_tables(tokens=tokens)


def test_values_that_nobody_gives() -> None:
    with pytest.raises(TableError, match="TAPE: no instruction gives it"):
        require_tables(row(O.BackwardInput, gives=(T.GRAD_OUT, T.WGRAD)))


def test_forms_without_a_row() -> None:
    with pytest.raises(TableError, match=f"{[*Form][-1].name} has no row"):
        require_tables(forms=FORMS[:-1])


def test_the_stub_of_costs_is_that_of_the_table() -> None:
    assert STUB.read_text() == stub(), "python -m schedir.ir.cost.cost_fields writes it"


def test_lanes_without_a_row() -> None:
    with pytest.raises(TableError, match=f"{[*Lane][-1].name} has no row"):
        require_tables(lanes=LANES[:-1])
