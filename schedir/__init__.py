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

from importlib import import_module
from typing import Any

from schedir import errors, schedules
from schedir.check import check
from schedir.compile import compile
from schedir.costs import Costs
from schedir.greedy import greedy
from schedir.ops import Instr, Opcode
from schedir.plan import Plan
from schedir.program import Program, Stream
from schedir.simulate import simulate
from schedir.sizes import Sizes
from schedir.text import parse, show
from schedir.ties import Ties, ties
from schedir.timeline import Timeline
from schedir.trace import load_timeline, save_timeline
from schedir.words import EMPTY, B, F, I, W, Word, draft, overlap, weave

__version__ = "0.1.0"

# What needs torch or matplotlib, or is seldom used, is imported when it is first named.
_LATER = {"gpt", "kernels", "parallel", "runtime", "testing", "torch_csv", "train", "viz"}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return import_module(f"schedir.{name}")
    raise AttributeError(f"module 'schedir' has no attribute {name!r}")


__all__ = [
    "EMPTY",
    "B",
    "Costs",
    "F",
    "I",
    "Instr",
    "Opcode",
    "Plan",
    "Program",
    "Sizes",
    "Stream",
    "Ties",
    "Timeline",
    "W",
    "Word",
    "check",
    "compile",
    "draft",
    "errors",
    "greedy",
    "load_timeline",
    "overlap",
    "parse",
    "save_timeline",
    "schedules",
    "show",
    "simulate",
    "ties",
    "weave",
]
