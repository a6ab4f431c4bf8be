"""Check: a program that passes finishes, is complete, and uses every value after it is made."""

from __future__ import annotations

import numpy as np

from schedir.complete import completeness
from schedir.errors import OrderError, Site
from schedir.explain import deadlock
from schedir.graph import Graph, Model
from schedir.index import NONE
from schedir.ops import ROWS, Token
from schedir.program import Program
from schedir.walk import walk


def check(program: Program, model: Model = "device") -> Program:
    """Return `program` if it is right, whoever wrote it.

    It is complete (every stage runs every microbatch forward and backward once, every message
    has both sides, gradients are reduced and stepped once), each rank gives a value before it
    uses it, and no ranks wait for each other under the progress model of the transport that
    will run it: "edge", "pair", "device" or "serial".

    Raises a ProgramError that says what is wrong and where: CompletenessError (PartnerError,
    ReductionError), GroupError, LevelError, OrderError or DeadlockError.
    """
    graph = Graph(program, model, completeness(program, draft=False))
    _in_order(graph)
    reached = walk(graph)
    if not reached.done.all():
        raise deadlock(graph, reached)
    return program


def check_draft(program: Program) -> Program:
    """Return a draft if its compute is all there; whether it finishes, the lowering finds out."""
    completeness(program, draft=True)
    return program


def _in_order(graph: Graph) -> None:
    """Each value is given earlier in the same Stream, and not by what runs together with it.

    Lanes run at their own pace, but the host issues a Stream in order: a wait for what has not
    been issued yet would wait for nothing.
    """
    position = np.arange(len(graph))
    first = len(graph)
    for needs in graph.needs:
        wrong = needs > position
        if graph.index.joined.any():
            wrong |= (needs != NONE) & (graph.gates[0][needs] == graph.gates[0])
        if wrong.any() and wrong.argmax() < first:
            first = int(wrong.argmax())
            giver = int(needs[first])
    if first == len(graph):
        return
    rank, at, instr = graph.index.place(first)
    _, given_at, given = graph.index.place(giver)
    token = _token(given.op, instr.op)
    if giver > first:
        fact = f"{instr} needs {token}, which {given} gives only later"
    else:
        fact = f"{instr} needs {token} from {given}, but they run as one"
    raise OrderError(
        fact,
        program=graph.program.name,
        sites=[Site(rank, at, instr, "needs it here"), Site(rank, given_at, given, "gives it")],
    )


def _token(giver: int, needer: int) -> str:
    """What one instruction gives and the other needs, in words."""
    shared = {*ROWS[giver].gives} & {*ROWS[needer].needs}
    names = {
        Token.ACT_IN: "the activation", Token.ACT_OUT: "the activation",
        Token.SAVED: "what it saved",
        Token.GRAD_IN: "the gradient", Token.GRAD_OUT: "the gradient", Token.TAPE: "the tape",
        Token.WGRAD: "the weights' gradient", Token.GRAD: "the reduced gradient",
        Token.NORM: "the norm",
    }  # fmt: skip
    return names[min(shared)] if shared else "the value"
