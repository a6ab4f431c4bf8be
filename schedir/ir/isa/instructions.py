"""The instruction table: one row per instruction, with all that schedir knows about it.

Printer, parser, flow of values, dependency graph, memory count, simulator, executor and
`docs/ir.md` read these rows; none of them restates what a row says.
"""

from __future__ import annotations

from functools import cache
from typing import Final, Literal, NamedTuple

from schedir.ir.isa.opcodes import Form as Form
from schedir.ir.isa.opcodes import Lane as Lane
from schedir.ir.isa.opcodes import Opcode as Opcode
from schedir.ir.isa.opcodes import Token as Token
from schedir.ir.isa.table_schema import TIERS as TIERS
from schedir.ir.isa.table_schema import Change as Change
from schedir.ir.isa.table_schema import CollectiveRing as CollectiveRing
from schedir.ir.isa.table_schema import FormRow as FormRow
from schedir.ir.isa.table_schema import LaneRow as LaneRow
from schedir.ir.isa.table_schema import PeerRule as PeerRule
from schedir.ir.isa.table_schema import ProducerRule as ProducerRule
from schedir.ir.isa.table_schema import Row as Row
from schedir.ir.isa.table_schema import Scope as Scope
from schedir.ir.isa.table_schema import TokenRow as TokenRow
from schedir.ir.isa.table_schema import Traffic as Traffic

_T, _L, _O = Token, Lane, Opcode
_MB, _STAGE, _RANK = Scope.MICROBATCH, Scope.STAGE, Scope.RANK
_ONCE, _ALL = ProducerRule.ONCE, ProducerRule.ALL

# The sizes that an optimizer step reads and writes. It only reads gradients.
STEPPED: Final = ("params", "params", "grads", "optimizer", "optimizer")


def _moves(link: Literal["hbm", "host", "disk", "dram"], *sizes: str, states: str) -> Traffic:
    """The traffic of a row that programs have with some values of their trait `states`."""
    return Traffic(link, sizes, trait="states", only=tuple(states.split()))


TOKENS: Final[tuple[TokenRow, ...]] = (
    TokenRow(_T.ACT_IN, _MB, _ONCE, "the activation", "activation", PeerRule.PREVIOUS,
             handed=_T.ACT_OUT),
    TokenRow(_T.ACT_OUT, _MB, _ONCE, "the activation", "activation", PeerRule.NEXT),
    TokenRow(_T.SAVED, _MB, _ONCE, "what the forward saved", "saved", training=True),
    TokenRow(_T.GRAD_IN, _MB, _ONCE, "the gradient", "gradient", PeerRule.NEXT,
             handed=_T.GRAD_OUT, training=True, like="activation"),
    TokenRow(_T.GRAD_OUT, _MB, _ONCE, "the gradient", "gradient", PeerRule.PREVIOUS, training=True,
             like="activation"),
    TokenRow(_T.TAPE, _MB, _ONCE, "what its I leaves", "tape", made_of=(_T.SAVED, "both"),
             training=True, like="saved"),
    TokenRow(_T.WGRAD, _STAGE, _ALL, "the weights' gradient", "grads", training=True),
    TokenRow(_T.GRAD, _STAGE, _ALL, "the reduced gradient", training=True),
    TokenRow(_T.NORM, _RANK, _ALL, "the norm"),
    TokenRow(_T.PARAMETERS, _RANK, ProducerRule.VERSION, "the weights"),
    TokenRow(_T.SKIP_IN, _MB, _ONCE, "the skip", "skip", PeerRule.SKIP_FROM, handed=_T.SKIP_OUT),
    TokenRow(_T.SKIP_OUT, _MB, _ONCE, "the skip", "skip", PeerRule.SKIP_TO),
    TokenRow(_T.SKIP_GRAD_IN, _MB, _ONCE, "the skip's gradient", "skip", PeerRule.SKIP_TO,
             handed=_T.SKIP_GRAD_OUT, training=True),
    TokenRow(_T.SKIP_GRAD_OUT, _MB, _ONCE, "the skip's gradient", "skip", PeerRule.SKIP_FROM,
             training=True),
    TokenRow(_T.OWN_NORM, _RANK, _ALL, "the rank's part of the norm"),
    TokenRow(_T.FULL, _STAGE, ProducerRule.AGAIN, "the whole weights", "params",
             trait="zero", training=True),
    TokenRow(_T.PARTS, _STAGE, _ALL, "the weights in parts", trait="zero", training=True),
    TokenRow(_T.ROOM, _STAGE, ProducerRule.SINCE, "the room for the weights' gradient",
             trait="reduce", training=True),
    TokenRow(_T.COPY, _STAGE, _ALL, "the copy of what the step changes",
             trait="snapshots", training=True),
    TokenRow(_T.STATE, _STAGE, ProducerRule.AGAIN, "the optimizer's state", "optimizer",
             trait="states", lies="host", training=True),
    TokenRow(_T.STORED, _STAGE, _ALL, "the stored state", trait="states", only=("host", "disk"),
             training=True),
    TokenRow(_T.HOST_GRAD, _STAGE, _ALL, "the gradient on the host", trait="states",
             only=("cpu",), room=("host", "grads"), training=True),
    TokenRow(_T.HOST_WEIGHTS, _STAGE, _ALL, "the weights on the host", trait="states",
             only=("cpu",), room=("host", "params"), training=True),
    TokenRow(_T.RELOADED, _STAGE, _ALL, "the reloaded weights", trait="states", only=("cpu",),
             training=True),
    TokenRow(_T.JUDGED, _RANK, _ALL, "the word on gradients", trait="states", only=("cpu",),
             training=True),
)  # fmt: skip

FORMS: Final[tuple[FormRow, ...]] = (
    FormRow(Form.PART, "a tensor-parallel rank's 1/t of the value", split=True),
)

LANES: Final[tuple[LaneRow, ...]] = (
    LaneRow(_L.COMPUTE, False, "runs", "what the rank computes", "peer"),
    LaneRow(_L.ACT, True, "starts", "messages with activations",
            colour="#0072b2", label="activations"),
    LaneRow(_L.GRAD, True, "starts", "messages with gradients",
            colour="#d55e00", label="gradients"),
    LaneRow(_L.TP, False, "waits", "collectives of the tensor-parallel group",
            colour="#7a7a7a", label="tensor parallel"),
    LaneRow(_L.DP, False, "starts", "reductions over replicas and ranks",
            "reduction", "#1a1a1a", "reductions"),
    LaneRow(_L.PARAMS, False, "starts", "gathers of weights over replicas",
            "weights", "#cc79a7", "gathers of weights"),
    LaneRow(_L.D2H, False, "starts", "copies to the host", "offload", "#8c6d31"),
    LaneRow(_L.H2D, False, "starts", "copies from the host", "offload", "#c9a45c"),
    LaneRow(_L.DISK, False, "starts", "what the host writes to its disk, and reads from it",
            "disk", "#4a3728", "disk"),
    LaneRow(_L.HOST, False, "starts", "what the host computes beside its device",
            "step", "#6b8e23", "host computes"),
)  # fmt: skip

ROWS: Final[tuple[Row, ...]] = (
    Row(_O.Forward, "F", _L.COMPUTE, _MB, (_T.ACT_IN, _T.PARAMETERS, _T.SKIP_IN, _T.FULL),
        (_T.ACT_OUT, _T.SAVED, _T.SKIP_OUT), (_T.ACT_IN, _T.SKIP_IN),
        "Runs a stage on a microbatch, on the version of the weights that is the microbatch's; "
        "the last stage also computes the loss.", cost="F", computes=True),
    Row(_O.Backward, "B", _L.COMPUTE, _MB,
        (_T.SAVED, _T.GRAD_IN, _T.SKIP_GRAD_IN, _T.FULL, _T.ROOM),
        (_T.GRAD_OUT, _T.WGRAD, _T.SKIP_GRAD_OUT), (_T.SAVED, _T.GRAD_IN, _T.SKIP_GRAD_IN),
        "Whole backward: gradients of the input and of the weights.", cost="B", computes=True),
    Row(_O.BackwardInput, "I", _L.COMPUTE, _MB,
        (_T.SAVED, _T.GRAD_IN, _T.SKIP_GRAD_IN, _T.FULL, _T.ROOM),
        (_T.GRAD_OUT, _T.TAPE, _T.WGRAD, _T.SKIP_GRAD_OUT),
        (_T.SAVED, _T.GRAD_IN, _T.SKIP_GRAD_IN),
        "Gradient of the input, and of the weights that are not split (biases, norms); of what "
        "was saved, a tape keeps what the others need. The zero-bubble papers call it B.",
        cost="I", computes=True),
    Row(_O.BackwardWeight, "W", _L.COMPUTE, _MB, (_T.TAPE, _T.ROOM), (_T.WGRAD,), (_T.TAPE,),
        "Gradients of the weights that are split, from the tape.", cost="W", computes=True),
    Row(_O.SendAct, "send_act", _L.ACT, _MB, (_T.ACT_OUT,), (), (_T.ACT_OUT,),
        "Sends an activation to the rank of the next stage.",
        cost="send", hop=PeerRule.NEXT, meets=_O.RecvAct),
    Row(_O.RecvAct, "recv_act", _L.ACT, _MB, (), (_T.ACT_IN,), (),
        "Receives an activation from the rank of the previous stage.",
        hop=PeerRule.PREVIOUS, meets=_O.SendAct),
    Row(_O.SendGrad, "send_grad", _L.GRAD, _MB, (_T.GRAD_OUT,), (), (_T.GRAD_OUT,),
        "Sends a gradient to the rank of the previous stage.",
        cost="send", hop=PeerRule.PREVIOUS, meets=_O.RecvGrad),
    Row(_O.RecvGrad, "recv_grad", _L.GRAD, _MB, (), (_T.GRAD_IN,), (),
        "Receives a gradient from the rank of the next stage.",
        hop=PeerRule.NEXT, meets=_O.SendGrad),
    Row(_O.Scatter, "scatter", _L.COMPUTE, _MB, (_T.ACT_OUT,), (_T.ACT_OUT,), (),
        "Keeps this tensor-parallel rank's 1/t of an activation, so that only it is sent.",
        cost="scatter", form=Form.PART, traffic=Traffic("hbm", times=2), in_torch=True),
    Row(_O.Gather, "gather", _L.TP, _MB, (_T.ACT_IN,), (_T.ACT_IN,), (),
        "Makes a received activation whole by an all-gather in the tensor-parallel group, beside "
        "what computes; or of a piece's, where ranks share the sequence, the first tensor "
        "(arXiv 2205.05198).", cost="gather", ring=CollectiveRing("tp"),
        form=Form.PART, between_segments="sequence", in_torch=True),
    Row(_O.ScatterGrad, "scatter_grad", _L.COMPUTE, _MB, (_T.GRAD_OUT,), (_T.GRAD_OUT,), (),
        "Scatter of a gradient.", cost="scatter", form=Form.PART,
        traffic=Traffic("hbm", times=2), in_torch=True),
    Row(_O.GatherGrad, "gather_grad", _L.TP, _MB, (_T.GRAD_IN,), (_T.GRAD_IN,), (),
        "Gather of a gradient.", cost="gather", ring=CollectiveRing("tp"),
        form=Form.PART, between_segments="sequence", in_torch=True),
    Row(_O.ReduceGrads, "reduce_grads", _L.DP, _STAGE, (_T.WGRAD,), (_T.GRAD,), (_T.WGRAD,),
        "Sums a stage's gradient over the data-parallel group and scales it.",
        cost="reduce_grads", ring=CollectiveRing("dp", "grads", 2)),
    Row(_O.ReduceHolders, "reduce_holders", _L.DP, _STAGE, (_T.GRAD,), (_T.GRAD,), (),
        "Sums a stage's gradient over its holders, where it has several.",
        cost="reduce_holders", meets=_O.ReduceHolders, group="holders", drains="replicas",
        ring=CollectiveRing("holders", "grads", 2), in_torch=True),
    Row(_O.ReduceTied, "reduce_tied", _L.DP, _STAGE, (_T.GRAD,), (_T.GRAD,), (),
        "Sums the gradients of the copies of each tied weight of the rank, in the order of stages; "
        "all copies get the sum.",
        cost="reduce_tied", meets=_O.ReduceTied, group="tied", drains="always", in_torch=True),
    Row(_O.ReduceNorm, "reduce_norm", _L.DP, _RANK, (_T.GRAD,), (_T.NORM,), (),
        "The norm of all gradients, over all pipeline ranks.",
        cost="reduce_norm", meets=_O.ReduceNorm, group="model", drains="always", in_torch=True),
    Row(_O.OptimizerStep, "step", _L.COMPUTE, _RANK, (
            _T.GRAD, _T.NORM, _T.PARTS, _T.COPY, _T.STORED, _T.RELOADED, _T.JUDGED),
        (_T.PARAMETERS, _T.OWN_NORM), (_T.GRAD, _T.NORM),
        "Updates the parameters of the rank's stages; where each stage is stepped by itself, it "
        "ends the update, when all states are stored, or all weights are back.", cost="step",
        in_torch=True),
    Row(_O.SendSkip, "send_skip", _L.ACT, _MB, (_T.SKIP_OUT,), (), (_T.SKIP_OUT,),
        "Sends what a stage gives beside its activation to the rank of a later one.",
        cost="send", hop=PeerRule.SKIP_TO, meets=_O.RecvSkip),
    Row(_O.RecvSkip, "recv_skip", _L.ACT, _MB, (), (_T.SKIP_IN,), (),
        "Receives what an earlier stage gives beside its activation.",
        hop=PeerRule.SKIP_FROM, meets=_O.SendSkip),
    Row(_O.SendSkipGrad, "send_skip_grad", _L.GRAD, _MB, (_T.SKIP_GRAD_OUT,), (),
        (_T.SKIP_GRAD_OUT,),
        "Sends the gradient of a skip to the rank of the stage that gave the skip.",
        cost="send", hop=PeerRule.SKIP_FROM, meets=_O.RecvSkipGrad),
    Row(_O.RecvSkipGrad, "recv_skip_grad", _L.GRAD, _MB, (), (_T.SKIP_GRAD_IN,), (),
        "Receives the gradient of a skip.", hop=PeerRule.SKIP_TO, meets=_O.SendSkipGrad),
    Row(_O.Recompute, "R", _L.COMPUTE, _MB, (_T.SAVED, _T.PARAMETERS, _T.FULL),
        (_T.SAVED,), (),
        "Runs a stage forward again, on its inputs, which are all that its F then keeps.", cost="R",
        changes=(Change(_T.SAVED, "checkpoint", "saved"),), computes=True),
    Row(_O.Validate, "validate", _L.DP, _RANK, (_T.OWN_NORM,), (), (_T.OWN_NORM,),
        "The norm of all gradients over all pipeline ranks, behind a step that has not waited for "
        "it: the next step of the run does, and both are made again where it was wrong.",
        cost="validate", meets=_O.Validate, group="model", in_torch=True),
    Row(_O.Unshard, "unshard", _L.PARAMS, Scope.TURN, (_T.PARAMETERS,), (_T.FULL,), (),
        "Makes a stage's weights whole: an all-gather of the parts that replicas hold.",
        cost="unshard", ring=CollectiveRing("dp", "params")),
    Row(_O.Reshard, "reshard", _L.COMPUTE, Scope.TURN, (_T.FULL,), (_T.PARTS,), (_T.FULL,),
        "Lets go of all weights of a stage but the replica's own part."),
    Row(_O.ReduceScatter, "reduce_scatter", _L.DP, Scope.TURN, (_T.WGRAD,), (_T.GRAD, _T.ROOM),
        (_T.WGRAD,),
        "Sums a stage's gradient over the data-parallel group and scales it; each replica gets its "
        "own part of the sum.", cost="reduce_scatter", ring=CollectiveRing("dp", "grads")),
    Row(_O.Snapshot, "snapshot", _L.D2H, _STAGE, (_T.PARAMETERS,), (_T.COPY,), (),
        "Copies what the step will change of a stage, weights and the optimizer's state, to the "
        "host's memory, for a checkpoint that is written meanwhile; does nothing in a step behind "
        "which none is due.", cost="snapshot", idle="snapshot",
        traffic=Traffic("host", ("params", "optimizer"), always_shared=True,
                        trait="snapshots", only=(True,)), in_torch=True),
    Row(_O.Offload, "offload", _L.D2H, _MB, (_T.SAVED,), (_T.SAVED,), (),
        "Moves what a forward saved to the host's memory.", cost="offload",
        changes=(Change(_T.SAVED, "device", "host"),)),
    Row(_O.Reload, "reload", _L.H2D, _MB, (_T.SAVED,), (_T.SAVED,), (),
        "Moves it back to the device.", cost="reload",
        changes=(Change(_T.SAVED, "host", "device"),)),
    Row(_O.Spill, "spill", _L.DISK, _MB, (_T.SAVED,), (_T.SAVED,), (),
        "Moves what was offloaded from the host's memory to its disk.", cost="spill",
        changes=(Change(_T.SAVED, "host", "disk"),)),
    Row(_O.Fetch, "fetch", _L.DISK, _MB, (_T.SAVED,), (_T.SAVED,), (),
        "Moves it from the disk back to the host's memory.", cost="fetch",
        changes=(Change(_T.SAVED, "disk", "host"),)),
    Row(_O.LoadState, "load_state", _L.H2D, _STAGE, (_T.STATE, _T.GRAD, _T.COPY), (_T.STATE,), (),
        "Moves a stage's part of the optimizer's state to the device, when its gradient is there.",
        cost="load_state", changes=(Change(_T.STATE, "host", "device"),),
        traffic=_moves("host", "optimizer", states="host disk"), in_torch=True),
    Row(_O.StepStage, "step_stage", _L.COMPUTE, _STAGE,
        (_T.STATE, _T.GRAD, _T.NORM, _T.PARTS), (_T.STATE,), (),
        "Updates the parameters of a stage, when all gradients of the rank are there: whether they "
        "are finite is judged before anything is stepped.", cost="step_stage", of_all=True,
        traffic=_moves("hbm", *STEPPED, states="host disk"), in_torch=True),
    Row(_O.StoreState, "store_state", _L.D2H, _STAGE, (_T.STATE,), (_T.STATE, _T.STORED), (),
        "Moves the stage's part of the state back to the host's memory.", cost="store_state",
        changes=(Change(_T.STATE, "device", "host"),),
        traffic=_moves("host", "optimizer", states="host disk"), in_torch=True),
    Row(_O.SumAct, "sum_act", _L.TP, _MB, (_T.ACT_IN,), (_T.ACT_IN,), (),
        "Sums what a piece of a stage gives over the tensor-parallel group, before the next piece "
        "takes it (Megatron-LM's g); where ranks share the sequence, each is left its part of it.",
        cost="sum", ring=CollectiveRing("tp", turns=2), between_segments="always"),
    Row(_O.SumGrad, "sum_grad", _L.TP, _MB, (_T.GRAD_IN,), (_T.GRAD_IN,), (),
        "Sums the gradient of what a piece takes over the tensor-parallel group, before the piece "
        "that gave it takes that (Megatron-LM's f); likewise.",
        cost="sum", ring=CollectiveRing("tp", turns=2), between_segments="always"),
    Row(_O.ReduceSequence, "reduce_sequence", _L.TP, _STAGE, (_T.GRAD,), (_T.GRAD,), (),
        "Sums over the tensor-parallel group the gradients of what each of its ranks holds whole, "
        "and has seen its own part of the sequence with: norms, and biases behind sums.",
        cost="reduce_sequence", idle="reduction", in_torch=True),
    Row(_O.FetchState, "fetch_state", _L.DISK, _STAGE, (_T.STATE,), (_T.STATE,), (),
        "Moves a stage's part of the optimizer's state from the disk to the host's memory.",
        cost="fetch_state", changes=(Change(_T.STATE, "disk", "host"),),
        traffic=_moves("disk", "optimizer", states="disk"), in_torch=True),
    Row(_O.SpillState, "spill_state", _L.DISK, _STAGE, (_T.STATE,), (_T.STATE, _T.STORED), (),
        "Moves the stage's part of the state back to the disk.", cost="spill_state",
        changes=(Change(_T.STATE, "host", "disk"),),
        traffic=_moves("disk", "optimizer", states="disk"), in_torch=True),
    Row(_O.OffloadGrads, "offload_grads", _L.D2H, _STAGE,
        (_T.GRAD, _T.PARAMETERS), (_T.HOST_GRAD,), (),
        "Copies a stage's gradient to the host's memory, when it is reduced, and the host has no "
        "use any more for that of the update before.",
        cost="offload_grads", waits=(_L.DP,),
        traffic=_moves("host", "grads", states="cpu"), in_torch=True),
    Row(_O.StepHost, "step_host", _L.HOST, _STAGE,
        (_T.HOST_GRAD, _T.NORM, _T.PARTS, _T.COPY, _T.JUDGED), (_T.HOST_WEIGHTS,), (),
        "Updates a stage's parameters on the host, where the optimizer's state lies, when all "
        "gradients of the rank are there: whether they are finite is judged before anything is "
        "stepped.", cost="step_host", of_all=True, waits=(_L.DP, _L.D2H),
        traffic=_moves("dram", *STEPPED, states="cpu"), in_torch=True),
    Row(_O.ReloadWeights, "reload_weights", _L.H2D, _STAGE, (_T.HOST_WEIGHTS,), (_T.RELOADED,), (),
        "Copies what the host has stepped back to the device.", cost="reload_weights",
        traffic=_moves("host", "params", states="cpu"), in_torch=True),
    Row(_O.ReleaseGrads, "release_grads", _L.COMPUTE, _RANK,
        (_T.HOST_GRAD, _T.NORM), (_T.JUDGED,), (),
        "Says whether the rank's gradients are finite, when copies of all are on the host, and "
        "lets the next update add to them, while the host steps.",
        cost="release_grads", waits=(_L.DP, _L.D2H), in_torch=True),
)  # fmt: skip

BY_TEXT: Final = {row.text: row.op for row in ROWS}


@cache
def producers(token: Token) -> tuple[Opcode, ...]:
    """Who makes a value: gives it without having needed it."""
    return tuple(row.op for row in ROWS if token in row.gives and token not in row.needs)


@cache
def consumers(token: Token) -> tuple[Opcode, ...]:
    """Who uses a value as it is: needs it, and does not give it on."""
    return tuple(row.op for row in ROWS if token in row.needs and token not in row.gives)


@cache
def changes(token: Token) -> tuple[Opcode, ...]:
    """The instructions that change a value in place (need and give it), in execution order.

    That is the order of the table. But changes of form come first. A stage removes the forms of a
    value that it takes in, in the reverse of the order in which the other side gave them.
    """
    found = [row for row in ROWS if token in row.gives and token in row.needs]
    way = 1 if TOKENS[token].handed is None else -1
    found.sort(key=lambda row: len(FORMS) if row.form is None else way * row.form)
    return tuple(row.op for row in found)


@cache
def form_changes(token: Token) -> tuple[Opcode, ...]:
    """The instructions that change the form of a value, in execution order."""
    return tuple(op for op in changes(token) if ROWS[op].form is not None)


@cache
def between_segments(sequence: bool) -> tuple[Opcode, ...]:
    """The collectives between the segments of a stage, for this value of `Program.sequence`."""
    when = ("always", "sequence") if sequence else ("always",)
    return tuple(row.op for row in ROWS if row.between_segments in when)


@cache
def change_of(op: Opcode, token: Token) -> Change | None:
    """How an instruction changes the state of a value, if it does."""
    return next((change for change in ROWS[op].changes if change.token is token), None)


# What crosses the boundary of a stage, in the order of `program.Slots`; and of that what crosses
# it in every program.
BOUNDARY: Final = tuple(row.token for row in TOKENS if row.across is not None)
BETWEEN_NEIGHBOURS: Final = tuple(
    token
    for token in BOUNDARY
    if TOKENS[token].across in (PeerRule.NEXT, PeerRule.PREVIOUS) and not TOKENS[token].optional
)
# Kinds of instructions, read off the table.
SENDS: Final = tuple(row.op for row in ROWS if row.hop and row.needs)
RECEIVES: Final = tuple(row.op for row in ROWS if row.hop and row.gives)
TRANSFERS: Final = SENDS + RECEIVES
COLLECTIVES: Final = tuple(row.op for row in ROWS if row.meets is row.op)
FORM_CHANGES: Final = tuple(row.op for row in ROWS if row.form is not None)
# Of these, the ones between a whole value and a tensor-parallel rank's part of it.
SPLIT_CHANGES: Final = tuple(op for op in FORM_CHANGES if FORMS[ROWS[op].form or 0].split)
# Collectives of the tensor-parallel group on a value that crosses between stages or segments.
BOUNDARY_COLLECTIVES: Final = tuple(
    row.op for row in ROWS
    if row.ring is not None and row.ring.members == "tp" and row.per is _MB
)  # fmt: skip
# Of these, the ones that undo a form: a value is whole behind it.
GATHERS: Final = tuple(op for op in BOUNDARY_COLLECTIVES if ROWS[op].form is not None)
COMPUTE: Final = tuple(row.op for row in ROWS if row.computes)
# What computes, by what it makes of what: F; B and I, of which I leaves a tape; W, which takes it.
FORWARDS: Final = producers(Token.ACT_OUT)
BACKWARDS: Final = producers(Token.GRAD_OUT)  # W, which only adds to the weights, is none
SPLITS: Final = producers(Token.TAPE)
WHOLES: Final = tuple(op for op in BACKWARDS if op not in SPLITS)
LATE: Final = consumers(Token.TAPE)
STEPS: Final = producers(Token.PARAMETERS)
RELEASES: Final = producers(Token.JUDGED)  # what lets a next update add, ahead of the step
# Of what computes there is one each: whoever adds another must say which is meant where.
(FORWARD,), (BACKWARD,), (BACKWARD_INPUT,), (BACKWARD_WEIGHT,) = FORWARDS, WHOLES, SPLITS, LATE
(RECOMPUTE,) = (op for op in changes(Token.SAVED) if op in COMPUTE)
# What adds to a stage's sum of gradients; and by weights: those not split, and those that are.
ADDS: Final = producers(Token.WGRAD)
ADDS_TO_WEIGHTS: Final = (
    tuple(op for op in ADDS if Token.TAPE not in ROWS[op].needs),
    tuple(op for op in ADDS if Token.TAPE not in ROWS[op].gives),
)
REDUCES: Final = tuple(row.op for row in ROWS if row.lane is Lane.DP)
TRAINING_VALUES: Final = frozenset(row.token for row in TOKENS if row.training)
# The instructions that work with a gradient that crosses between stages. A program without a
# backward has none.
OF_GRADIENTS: Final = tuple(
    row.op for row in ROWS if {*row.needs, *row.gives} & TRAINING_VALUES & {*BOUNDARY}
)
OF_TRAINED: Final = tuple(
    row.op for row in ROWS
    if row.per is not _RANK and row.op not in FORWARDS
    and TRAINING_VALUES & {*row.needs, *row.gives}
)  # fmt: skip

# Stages on one rank hand over directly: what one takes in is what the other put out.
LOCAL_HANDOVER: Final = {
    row.token: (row.handed, row.across)
    for row in TOKENS
    if row.handed is not None and row.across is not None
}

# By value, what touches it off the compute lane: in a program without, compute's order says when.
OFF_COMPUTE: Final = {
    row.token: tuple(
        r.op for r in ROWS
        if row.token in {*r.needs, *r.gives, *r.frees} and r.lane is not Lane.COMPUTE
    )
    for row in TOKENS
}  # fmt: skip
# The instructions that work with a value and do not run a stage.
USERS: Final = {
    row.token: frozenset(r.op for r in ROWS if row.token in {*r.needs, *r.gives} and not r.computes)
    for row in TOKENS
}
# Values in slots whose number is a choice: what crosses boundaries, and, in a program with such
# instructions, what something off the compute lane makes, changes or frees.
SLOTTED: Final = BOUNDARY + tuple(
    row.token for row in TOKENS
    if row.token not in BOUNDARY and row.size and OFF_COMPUTE[row.token]
)  # fmt: skip
# Values that are held from the start of what makes them to the end of what frees them, where no
# number of slots is said.
KEPT: Final = tuple(row.token for row in TOKENS if row.size and row.token not in BOUNDARY)


@cache
def chain(op: Opcode, token: Token) -> tuple[Opcode, ...]:
    """Who may have given `token` to `op`, the last in the chain first.

    An instruction that both needs and gives a value changes it in place (Gather): it comes
    between the maker and everybody else.  Several change it in the order of the table.
    """
    changed = changes(token)
    if op in changed:
        changed = changed[: changed.index(op)]
    return (*reversed(changed), *producers(token))


class Instr(NamedTuple):
    """One instruction, decoded: a view, never stored in bulk.

    `stage` is 0 where the row is not addressed by it, and `mb` is the update, or the turn, where a
    row is not addressed by microbatch.

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
        if row.per is Scope.MICROBATCH:
            return f"{row.text} {self.stage}.{self.mb}"
        if row.per is Scope.RANK:
            return row.text + f" {self.mb}" * (self.mb > 0)
        return f"{row.text} {self.stage}" + f".{self.mb}" * (self.mb > 0)
