"""Check: a program that passes finishes, is complete, and uses every value after it is made."""

from __future__ import annotations

import numpy as np

from schedir.complete import completeness
from schedir.errors import OrderError, Site
from schedir.explain import deadlock
from schedir.graph import Graph, Model
from schedir.ops import ROWS, Token
from schedir.program import Program


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
    walk = graph.walk()
    if not walk.done.all():
        raise deadlock(graph, walk)
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
    giver, needer = graph.values.T
    late = (graph.index.rank[giver] == graph.index.rank[needer]) & (giver > needer)
    same = graph.enter[giver] == graph.enter[needer]
    wrong = np.flatnonzero(late | same)
    if not len(wrong):
        return
    first = int(wrong[needer[wrong].argmin()])
    rank, at, instr = graph.place(int(needer[first]))
    _, given_at, given = graph.place(int(giver[first]))
    token = _token(given.op, instr.op)
    if late[first]:
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
