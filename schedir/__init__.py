"""schedir: pipeline schedules as programs.  Write one, compile it, see it, run it.

>>> import schedir
>>> from schedir import B, F, Costs, Plan
>>> def mine(rank, ranks, microbatches):
...     lead = min(ranks - 1 - rank, microbatches)
...     return lead * F + (microbatches - lead) * (F + B) + lead * B
>>> program = schedir.compile(mine, Plan(ranks=4, microbatches=8))
>>> timeline = schedir.simulate(program, Costs(F=1, B=2))
>>> f"{timeline.span:g} units of time, {timeline.bubble:.1%} of it idle"
'33 units of time, 27.3% of it idle'
>>> timeline.peak_in_flight.tolist()
[4, 3, 2, 1]
>>> figure = schedir.viz.gantt(timeline)
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from schedir import errors, schedules
from schedir.compiler.compile import compile
from schedir.compiler.forwards import forwards
from schedir.io.cluster_file import load_cluster, save_cluster
from schedir.io.timeline_file import load_timeline, save_timeline
from schedir.ir.cluster import Cluster
from schedir.ir.costs import Costs
from schedir.ir.notebook import register
from schedir.ir.ops import Instr, Opcode
from schedir.ir.plan import Plan
from schedir.ir.program import Program, Stream
from schedir.ir.sizes import Sizes
from schedir.ir.text import parse, show
from schedir.ir.ties import Ties, ties
from schedir.ir.trust import trusting
from schedir.ir.zero import model_states
from schedir.passes.cut import in_pieces
from schedir.predict.layer_bytes import layer_bytes
from schedir.predict.simulate import simulate
from schedir.predict.timeline import Timeline
from schedir.schedules import words
from schedir.schedules.draft import draft
from schedir.schedules.greedy import greedy
from schedir.schedules.words import EMPTY, B, F, I, R, W, Word, overlap, weave
from schedir.verify.check import check
from schedir.verify.sequence import check_sequence

if TYPE_CHECKING:
    from schedir.foreign.instrument import instrument
    from schedir.shortest.bound import bound
    from schedir.shortest.frontier import frontier
    from schedir.shortest.search import search

__version__ = "0.1.0"

# What needs torch or matplotlib, or is seldom used, is imported when it is first named: a module,
# or `module:name`.
_LATER = {
    "bound": "shortest.bound:bound",
    "checkpoints": "checkpoints",
    "frontier": "shortest.frontier:frontier",
    "instrument": "foreign.instrument:instrument",
    "kernels": "kernels",
    "planner": "planner",
    "runtime": "runtime",
    "search": "shortest.search:search",
    "testing": "testing",
    "torch_csv": "io.torch_csv",
    "traces": "traces",
    "training": "training",
    "transports": "transports",
    "viz": "viz",
}

sys.modules[f"{__name__}.words"] = words  # `from schedir.words import F`, as they are written

# Looked for when a notebook first asks: pictures take a while to import.
register(lambda shown: str(import_module("schedir.viz.notebook").of(shown)))


def __getattr__(name: str) -> Any:
    if name in _LATER:
        module, _, inside = _LATER[name].partition(":")
        found = import_module(f"schedir.{module}")
        return getattr(found, inside) if inside else found
    raise AttributeError(f"module 'schedir' has no attribute {name!r}")


__all__ = [
    "EMPTY",
    "B",
    "Cluster",
    "Costs",
    "F",
    "I",
    "Instr",
    "Opcode",
    "Plan",
    "Program",
    "R",
    "Sizes",
    "Stream",
    "Ties",
    "Timeline",
    "W",
    "Word",
    "bound",
    "check",
    "check_sequence",
    "compile",
    "draft",
    "errors",
    "forwards",
    "frontier",
    "greedy",
    "in_pieces",
    "instrument",
    "layer_bytes",
    "load_cluster",
    "load_timeline",
    "model_states",
    "overlap",
    "parse",
    "save_cluster",
    "save_timeline",
    "schedules",
    "search",
    "show",
    "simulate",
    "ties",
    "trusting",
    "weave",
]
