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
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from schedir.ir.notebook import register

if TYPE_CHECKING:
    from schedir import errors, schedules
    from schedir.compiler.compile import compile
    from schedir.compiler.forwards import forwards
    from schedir.foreign.instrument import instrument
    from schedir.io.cluster_file import load_cluster, save_cluster
    from schedir.io.timeline_file import load_timeline, save_timeline
    from schedir.ir.cluster import Cluster
    from schedir.ir.costs import Costs
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
    from schedir.schedules.draft import draft
    from schedir.schedules.greedy import greedy
    from schedir.schedules.words import EMPTY, B, F, I, R, W, Word, overlap, weave
    from schedir.shortest.bound import bound
    from schedir.shortest.frontier import frontier
    from schedir.shortest.search import search
    from schedir.verify.check import check
    from schedir.verify.sequence import check_sequence

__version__ = "0.1.0"

# Where each name is defined: `module`, or `module:name`.  `__getattr__` imports a name when it is
# first used, which keeps `import schedir` and `schedir --help` fast.
_HOME: Final = {
    "B": "schedules.words:B",
    "Cluster": "ir.cluster:Cluster",
    "Costs": "ir.costs:Costs",
    "EMPTY": "schedules.words:EMPTY",
    "F": "schedules.words:F",
    "I": "schedules.words:I",
    "Instr": "ir.ops:Instr",
    "Opcode": "ir.ops:Opcode",
    "Plan": "ir.plan:Plan",
    "Program": "ir.program:Program",
    "R": "schedules.words:R",
    "Sizes": "ir.sizes:Sizes",
    "Stream": "ir.program:Stream",
    "Ties": "ir.ties:Ties",
    "Timeline": "predict.timeline:Timeline",
    "W": "schedules.words:W",
    "Word": "schedules.words:Word",
    "bound": "shortest.bound:bound",
    "check": "verify.check:check",
    "check_sequence": "verify.sequence:check_sequence",
    "checkpoints": "checkpoints",
    "compile": "compiler.compile:compile",
    "draft": "schedules.draft:draft",
    "errors": "errors",
    "forwards": "compiler.forwards:forwards",
    "frontier": "shortest.frontier:frontier",
    "greedy": "schedules.greedy:greedy",
    "in_pieces": "passes.cut:in_pieces",
    "instrument": "foreign.instrument:instrument",
    "kernels": "kernels",
    "layer_bytes": "predict.layer_bytes:layer_bytes",
    "load_cluster": "io.cluster_file:load_cluster",
    "load_timeline": "io.timeline_file:load_timeline",
    "model_states": "ir.zero:model_states",
    "overlap": "schedules.words:overlap",
    "parse": "ir.text:parse",
    "planner": "planner",
    "runtime": "runtime",
    "save_cluster": "io.cluster_file:save_cluster",
    "save_timeline": "io.timeline_file:save_timeline",
    "schedules": "schedules",
    "search": "shortest.search:search",
    "show": "ir.text:show",
    "simulate": "predict.simulate:simulate",
    "testing": "testing",
    "ties": "ir.ties:ties",
    "torch_csv": "io.torch_csv",
    "traces": "traces",
    "training": "training",
    "transports": "transports",
    "trusting": "ir.trust:trusting",
    "viz": "viz",
    "weave": "schedules.words:weave",
    "words": "words",
}

# A notebook calls this when it first shows a program, because pictures take a while to import.
register(lambda shown: str(import_module("schedir.viz.notebook").of(shown)))


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'schedir' has no attribute {name!r}")
    module_name, _, attribute = _HOME[name].partition(":")
    module = import_module(f"schedir.{module_name}")
    value = getattr(module, attribute) if attribute else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    # `help(schedir)` imports every name of this list, and without torch it cannot import `runtime`.
    missing = {"runtime"} if find_spec("torch") is None else set()
    return sorted({*globals(), *_HOME} - missing)


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
