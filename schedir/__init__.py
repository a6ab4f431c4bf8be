"""Compile, check, simulate, draw and run pipeline schedules.

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

from schedir.ir.notebook_repr import register

if TYPE_CHECKING:
    from schedir import errors, schedules
    from schedir.compiler.compile import compile
    from schedir.compiler.evaluation_program import forwards
    from schedir.instrumentation.instrument import instrument
    from schedir.io.cluster_file import load_cluster, save_cluster
    from schedir.io.timeline_file import load_timeline, save_timeline
    from schedir.ir.cost.cluster import Cluster
    from schedir.ir.cost.costs import Costs
    from schedir.ir.cost.sizes import Sizes
    from schedir.ir.cost.zero_states import model_states
    from schedir.ir.input_trust import trusting
    from schedir.ir.isa.instructions import Instr, Opcode
    from schedir.ir.pipeline.pipeline_shape import Plan
    from schedir.ir.pipeline.tied_weights import Ties, ties
    from schedir.ir.program import Program, Stream
    from schedir.ir.text_format import parse, show
    from schedir.passes.splitting.stage_segmentation import in_pieces
    from schedir.predict.activation_bytes import layer_bytes
    from schedir.predict.simulate import simulate
    from schedir.predict.timeline import Timeline
    from schedir.schedule_search.bounds.lower_bound import bound
    from schedir.schedule_search.memory_frontier import frontier
    from schedir.schedule_search.search import search
    from schedir.schedules.draft import draft
    from schedir.schedules.greedy import greedy
    from schedir.schedules.schedule_algebra import EMPTY, B, F, I, R, W, Word, overlap, weave
    from schedir.verify.check import check
    from schedir.verify.program_sequence import check_sequence

__version__ = "0.1.0"

# Where each name is defined: `module`, or `module:name`.  `__getattr__` imports a name when it is
# first used, which keeps `import schedir` and `schedir --help` fast.
_HOME: Final = {
    "B": "schedules.schedule_algebra:B",
    "Cluster": "ir.cost.cluster:Cluster",
    "Costs": "ir.cost.costs:Costs",
    "EMPTY": "schedules.schedule_algebra:EMPTY",
    "F": "schedules.schedule_algebra:F",
    "I": "schedules.schedule_algebra:I",
    "Instr": "ir.isa.instructions:Instr",
    "Opcode": "ir.isa.instructions:Opcode",
    "Plan": "ir.pipeline.pipeline_shape:Plan",
    "Program": "ir.program:Program",
    "R": "schedules.schedule_algebra:R",
    "Sizes": "ir.cost.sizes:Sizes",
    "Stream": "ir.program:Stream",
    "Ties": "ir.pipeline.tied_weights:Ties",
    "Timeline": "predict.timeline:Timeline",
    "W": "schedules.schedule_algebra:W",
    "Word": "schedules.schedule_algebra:Word",
    "bound": "schedule_search.bounds.lower_bound:bound",
    "check": "verify.check:check",
    "check_sequence": "verify.program_sequence:check_sequence",
    "checkpoints": "checkpoints",
    "compile": "compiler.compile:compile",
    "draft": "schedules.draft:draft",
    "errors": "errors",
    "forwards": "compiler.evaluation_program:forwards",
    "frontier": "schedule_search.memory_frontier:frontier",
    "greedy": "schedules.greedy:greedy",
    "in_pieces": "passes.splitting.stage_segmentation:in_pieces",
    "instrument": "instrumentation.instrument:instrument",
    "kernels": "kernels",
    "layer_bytes": "predict.activation_bytes:layer_bytes",
    "load_cluster": "io.cluster_file:load_cluster",
    "load_timeline": "io.timeline_file:load_timeline",
    "model_states": "ir.cost.zero_states:model_states",
    "overlap": "schedules.schedule_algebra:overlap",
    "parse": "ir.text_format:parse",
    "planner": "planner",
    "runtime": "runtime",
    "save_cluster": "io.cluster_file:save_cluster",
    "save_timeline": "io.timeline_file:save_timeline",
    "schedule_algebra": "schedule_algebra",
    "schedules": "schedules",
    "search": "schedule_search.search:search",
    "show": "ir.text_format:show",
    "simulate": "predict.simulate:simulate",
    "testing": "testing",
    "ties": "ir.pipeline.tied_weights:ties",
    "torch_csv": "io.torch_csv",
    "traces": "traces",
    "training": "training",
    "transports": "transports",
    "trusting": "ir.input_trust:trusting",
    "viz": "viz",
    "weave": "schedules.schedule_algebra:weave",
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
