"""The instruction table: one row per instruction, and all that schedir knows about it.

Printer, parser, dependency graph, memory count, simulator, executor and `docs/ir.md` read
these rows; none of them restates what a row says.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Final, NamedTuple


class Token(IntEnum):
    """What instructions hand to each other: one value per (stage, mb), or per stage, or rank."""

    ACT_IN = 0
    ACT_OUT = 1
    SAVED = 2
    GRAD_IN = 3
    GRAD_OUT = 4
    TAPE = 5
    WGRAD = 6
    GRAD = 7
    NORM = 8
    PARAMETERS = 9


class Lane(IntEnum):
    """An in-order queue of a rank; progress models cut act and grad finer, or fuse them."""

    COMPUTE = 0
    ACT = 1
    GRAD = 2
    TP = 3
    DP = 4


class Per(Enum):
    """What an instruction exists once for, which is also how its text is addressed.

    The last two once in each update, whose number follows in the text if it is not 0.
    """

    MICROBATCH = "stage.mb"
    STAGE = "stage"
    RANK = ""


class Opcode(IntEnum):
    """The instructions, by number; the number is the row in `ROWS`.

    >>> from schedir import Opcode, Plan, compile, schedules
    >>> program = compile(schedules.gpipe, Plan(ranks=2, microbatches=4))
    >>> [instr.mb for instr in program.streams[0] if instr.op is Opcode.SendAct]
    [0, 1, 2, 3]
    """

    Forward = 0
    Backward = 1
    BackwardInput = 2
    BackwardWeight = 3
    SendAct = 4
    RecvAct = 5
    SendGrad = 6
    RecvGrad = 7
    Scatter = 8
    Gather = 9
    ScatterGrad = 10
    GatherGrad = 11
    ReduceGrads = 12
    ReduceHolders = 13
    ReduceTied = 14
    ReduceNorm = 15
    OptimizerStep = 16


class Row(NamedTuple):
    """A row of the instruction table.

    `needs` must have been given before the instruction starts, `gives` is there when it ends,
    `frees` is of no use to anybody afterwards.  `hop` is set for transfers: the other side of
    the message sits at stage + hop.  `meets` is set for what has partners on other ranks.
    """

    op: Opcode
    text: str
    lane: Lane
    per: Per
    needs: tuple[Token, ...]
    gives: tuple[Token, ...]
    frees: tuple[Token, ...]
    doc: str
    hop: int = 0
    meets: Opcode | None = None


_T, _L, _O = Token, Lane, Opcode
_MB = Per.MICROBATCH

ROWS: Final[tuple[Row, ...]] = (
    Row(_O.Forward, "F", _L.COMPUTE, _MB, (_T.ACT_IN, _T.PARAMETERS), (_T.ACT_OUT, _T.SAVED),
        (_T.ACT_IN,),
        "Runs a stage on a microbatch, on the version of the weights that is the microbatch's; "
        "the last stage also computes the loss."),
    Row(_O.Backward, "B", _L.COMPUTE, _MB, (_T.SAVED, _T.GRAD_IN), (_T.GRAD_OUT, _T.WGRAD),
        (_T.SAVED, _T.GRAD_IN),
        "Whole backward: gradients of the input and of the weights."),
    Row(_O.BackwardInput, "I", _L.COMPUTE, _MB, (_T.SAVED, _T.GRAD_IN),
        (_T.GRAD_OUT, _T.TAPE, _T.WGRAD), (_T.SAVED, _T.GRAD_IN),
        "Gradient of the input, and of the weights that are not split (biases, norms); of what "
        "was saved, a tape keeps what the others need. The zero-bubble papers call it B."),
    Row(_O.BackwardWeight, "W", _L.COMPUTE, _MB, (_T.TAPE,), (_T.WGRAD,), (_T.TAPE,),
        "Gradients of the weights that are split, from the tape."),
    Row(_O.SendAct, "send_act", _L.ACT, _MB, (_T.ACT_OUT,), (), (_T.ACT_OUT,),
        "Sends an activation to the rank of the next stage.", +1, _O.RecvAct),
    Row(_O.RecvAct, "recv_act", _L.ACT, _MB, (), (_T.ACT_IN,), (),
        "Receives an activation from the rank of the previous stage.", -1, _O.SendAct),
    Row(_O.SendGrad, "send_grad", _L.GRAD, _MB, (_T.GRAD_OUT,), (), (_T.GRAD_OUT,),
        "Sends a gradient to the rank of the previous stage.", -1, _O.RecvGrad),
    Row(_O.RecvGrad, "recv_grad", _L.GRAD, _MB, (), (_T.GRAD_IN,), (),
        "Receives a gradient from the rank of the next stage.", +1, _O.SendGrad),
    Row(_O.Scatter, "scatter", _L.COMPUTE, _MB, (_T.ACT_OUT,), (_T.ACT_OUT,), (),
        "Keeps this tensor-parallel rank's 1/t of an activation, so that only it is sent."),
    Row(_O.Gather, "gather", _L.TP, _MB, (_T.ACT_IN,), (_T.ACT_IN,), (),
        "Makes a received activation whole by an all-gather in the tensor-parallel group, beside "
        "what computes."),
    Row(_O.ScatterGrad, "scatter_grad", _L.COMPUTE, _MB, (_T.GRAD_OUT,), (_T.GRAD_OUT,), (),
        "Scatter of a gradient."),
    Row(_O.GatherGrad, "gather_grad", _L.TP, _MB, (_T.GRAD_IN,), (_T.GRAD_IN,), (),
        "Gather of a gradient."),
    Row(_O.ReduceGrads, "reduce_grads", _L.DP, Per.STAGE, (_T.WGRAD,), (_T.GRAD,), (_T.WGRAD,),
        "Sums a stage's gradient over the data-parallel group and scales it."),
    Row(_O.ReduceHolders, "reduce_holders", _L.DP, Per.STAGE, (_T.GRAD,), (_T.GRAD,), (),
        "Sums a stage's gradient over its two holders, where microbatches go both ways.",
        0, _O.ReduceHolders),
    Row(_O.ReduceTied, "reduce_tied", _L.DP, Per.STAGE, (_T.GRAD,), (_T.GRAD,), (),
        "Sums the gradients of the copies of each tied weight of the rank, in the order of stages; "
        "all copies get the sum.",
        0, _O.ReduceTied),
    Row(_O.ReduceNorm, "reduce_norm", _L.DP, Per.RANK, (_T.GRAD,), (_T.NORM,), (),
        "The norm of all gradients, over all pipeline ranks.", 0, _O.ReduceNorm),
    Row(_O.OptimizerStep, "step", _L.COMPUTE, Per.RANK, (_T.GRAD, _T.NORM), (_T.PARAMETERS,),
        (_T.GRAD, _T.NORM),
        "Updates the parameters of the rank's stages."),
)  # fmt: skip

BY_TEXT: Final = {row.text: row.op for row in ROWS}


def makers(token: Token) -> tuple[Opcode, ...]:
    """Who makes a value: gives it without having needed it."""
    return tuple(row.op for row in ROWS if token in row.gives and token not in row.needs)


def takers(token: Token) -> tuple[Opcode, ...]:
    """Who uses a value as it is: needs it, and does not give it on."""
    return tuple(row.op for row in ROWS if token in row.needs and token not in row.gives)


# What crosses the boundary of a stage, in the order of `program.Slots`.
BOUNDARY: Final = (Token.ACT_IN, Token.ACT_OUT, Token.GRAD_IN, Token.GRAD_OUT)
# Kinds of instructions, read off the table.
SENDS: Final = tuple(row.op for row in ROWS if row.hop and row.needs)
RECEIVES: Final = tuple(row.op for row in ROWS if row.hop and row.gives)
TRANSFERS: Final = SENDS + RECEIVES
COLLECTIVES: Final = tuple(row.op for row in ROWS if row.meets is row.op)
SHARDING: Final = tuple(row.op for row in ROWS if {*row.needs} & {*row.gives} & {*BOUNDARY})
GATHERS: Final = tuple(op for op in SHARDING if ROWS[op].lane is Lane.TP)
COMPUTE: Final = tuple(
    row.op for row in ROWS
    if row.lane is Lane.COMPUTE and row.per is _MB and row.op not in SHARDING
)  # fmt: skip
BACKWARDS: Final = makers(Token.GRAD_OUT)  # W, which only adds to the weights, is none
# What adds to a stage's sum of gradients; and by weights: those not split, and those that are.
ADDS: Final = makers(Token.WGRAD)
ADDS_TO_WEIGHTS: Final = (
    tuple(op for op in ADDS if Token.TAPE not in ROWS[op].needs),
    tuple(op for op in ADDS if Token.TAPE not in ROWS[op].gives),
)

# Neighbours on one rank hand over directly: what one stage takes in is what the other put out.
HANDED: Final = {Token.ACT_IN: (Token.ACT_OUT, -1), Token.GRAD_IN: (Token.GRAD_OUT, +1)}


def givers(op: Opcode, token: Token) -> tuple[Opcode, ...]:
    """Who may have given `token` to `op`, the last in the chain first.

    An instruction that both needs and gives a value changes it in place (Gather): it comes
    between the maker and everybody else.  Several change it in the order of the table.
    """
    changes = [r.op for r in ROWS if token in r.gives and token in r.needs]
    if op in changes:
        changes = changes[: changes.index(op)]
    return (*reversed(changes), *makers(token))


class Instr(NamedTuple):
    """One instruction, decoded: a view, never stored in bulk.

    `stage` is 0 where the row is not addressed by it, and `mb` is the update where a row is not
    addressed by microbatch.

    >>> from schedir import Instr, Opcode
    >>> forward = Instr(Opcode.Forward, stage=2, mb=5)
    >>> str(forward), forward.stage
    ('F 2.5', 2)
    """

    op: Opcode
    stage: int
    mb: int

    def __str__(self) -> str:
        row = ROWS[self.op]
        if row.per is Per.MICROBATCH:
            return f"{row.text} {self.stage}.{self.mb}"
        if row.per is Per.STAGE:
            return f"{row.text} {self.stage}" + f".{self.mb}" * (self.mb > 0)
        return row.text + f" {self.mb}" * (self.mb > 0)
