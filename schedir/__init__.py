"""Compile, check, simulate, draw and run pipeline schedules.

Example:
    >>> import schedir
    >>> from schedir import B, F, Costs
    >>> def mine(rank, ranks, microbatches):
    ...     warmup = min(ranks - 1 - rank, microbatches)
    ...     return warmup * F + (microbatches - warmup) * (F + B) + warmup * B
    >>> program = schedir.compile(mine, ranks=4, microbatches=8)
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

from schedir.ir.notebook_repr import register_renderer
from schedir.retired_names import make_attribute_error

if TYPE_CHECKING:
    from schedir import errors, schedules
    from schedir.compiler.compile import compile
    from schedir.compiler.evaluation_program import evaluation_program
    from schedir.compiler.schedule_recognition import recognize
    from schedir.instrumentation.instrument import instrument
    from schedir.io.cluster_file import load_cluster, save_cluster
    from schedir.io.timeline_file import load_timeline, save_timeline
    from schedir.ir.cost.cluster import Cluster
    from schedir.ir.cost.costs import Costs
    from schedir.ir.cost.sizes import Sizes
    from schedir.ir.cost.zero_states import zero_model_states
    from schedir.ir.input_trust import input_limits
    from schedir.ir.isa.instructions import Instr, Opcode
    from schedir.ir.pipeline.pipeline_shape import PipelineShape
    from schedir.ir.pipeline.tied_weights import TiedWeights, find_tied_weights
    from schedir.ir.program import Program, Stream
    from schedir.ir.text_format import from_text, to_text
    from schedir.passes.splitting.stage_segmentation import split_costs
    from schedir.predict.layer_activation_bytes import activation_bytes_per_layer
    from schedir.predict.simulate import simulate
    from schedir.predict.timeline import Timeline
    from schedir.schedule_search.bounds.lower_bound import lower_bound
    from schedir.schedule_search.memory_frontier import memory_frontier
    from schedir.schedule_search.search import search_schedule
    from schedir.schedules.greedy import greedy_schedule
    from schedir.schedules.schedule_algebra import (
        EMPTY,
        B,
        F,
        I,
        R,
        RankSchedule,
        W,
        concat,
        overlapped_pair,
        weave,
    )
    from schedir.schedules.schedule_expansion import expand_schedule
    from schedir.verify.check import check
    from schedir.verify.program_sequence import check_program_sequence
    from schedir.verify.replicas import check_replicas

__version__ = "0.1.0"

# Public name -> the place that defines it: `module` or `module:name`, relative to `schedir`.
# `__getattr__` imports a name at its first use, which keeps `import schedir` and `schedir --help`
# fast.
_LAZY_IMPORTS: Final = {
    "B": "schedules.schedule_algebra:B",
    "Cluster": "ir.cost.cluster:Cluster",
    "Costs": "ir.cost.costs:Costs",
    "EMPTY": "schedules.schedule_algebra:EMPTY",
    "F": "schedules.schedule_algebra:F",
    "I": "schedules.schedule_algebra:I",
    "Instr": "ir.isa.instructions:Instr",
    "Opcode": "ir.isa.instructions:Opcode",
    "PipelineShape": "ir.pipeline.pipeline_shape:PipelineShape",
    "Program": "ir.program:Program",
    "R": "schedules.schedule_algebra:R",
    "Sizes": "ir.cost.sizes:Sizes",
    "Stream": "ir.program:Stream",
    "TiedWeights": "ir.pipeline.tied_weights:TiedWeights",
    "Timeline": "predict.timeline:Timeline",
    "W": "schedules.schedule_algebra:W",
    "RankSchedule": "schedules.schedule_algebra:RankSchedule",
    "lower_bound": "schedule_search.bounds.lower_bound:lower_bound",
    "check": "verify.check:check",
    "check_program_sequence": "verify.program_sequence:check_program_sequence",
    "check_replicas": "verify.replicas:check_replicas",
    "checkpoints": "checkpoints",
    "compile": "compiler.compile:compile",
    "concat": "schedules.schedule_algebra:concat",
    "expand_schedule": "schedules.schedule_expansion:expand_schedule",
    "errors": "errors",
    "evaluation_program": "compiler.evaluation_program:evaluation_program",
    "recognize": "compiler.schedule_recognition:recognize",
    "memory_frontier": "schedule_search.memory_frontier:memory_frontier",
    "greedy_schedule": "schedules.greedy:greedy_schedule",
    "split_costs": "passes.splitting.stage_segmentation:split_costs",
    "instrument": "instrumentation.instrument:instrument",
    "kernels": "kernels",
    "activation_bytes_per_layer": "predict.layer_activation_bytes:activation_bytes_per_layer",
    "load_cluster": "io.cluster_file:load_cluster",
    "load_timeline": "io.timeline_file:load_timeline",
    "zero_model_states": "ir.cost.zero_states:zero_model_states",
    "overlapped_pair": "schedules.schedule_algebra:overlapped_pair",
    "from_text": "ir.text_format:from_text",
    "planner": "planner",
    "runtime": "runtime",
    "save_cluster": "io.cluster_file:save_cluster",
    "save_timeline": "io.timeline_file:save_timeline",
    "schedule_algebra": "schedule_algebra",
    "schedules": "schedules",
    "search_schedule": "schedule_search.search:search_schedule",
    "to_text": "ir.text_format:to_text",
    "simulate": "predict.simulate:simulate",
    "testing": "testing",
    "find_tied_weights": "ir.pipeline.tied_weights:find_tied_weights",
    "torch_csv": "io.torch_csv",
    "traces": "traces",
    "training": "training",
    "transports": "transports",
    "input_limits": "ir.input_trust:input_limits",
    "viz": "viz",
    "weave": "schedules.schedule_algebra:weave",
}

# A notebook calls this function to show a program.  Only then the function imports `schedir.viz`,
# because that import is slow.
register_renderer(lambda shown: str(import_module("schedir.viz.notebook").to_html(shown)))


def __getattr__(name: str) -> Any:
    if name not in _LAZY_IMPORTS:
        raise make_attribute_error(__name__, name)
    module_name, _, attribute = _LAZY_IMPORTS[name].partition(":")
    module = import_module(f"schedir.{module_name}")
    value = getattr(module, attribute) if attribute else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    # `help(schedir)` imports every name of this list, and `runtime` cannot be imported without
    # torch.
    missing = {"runtime"} if find_spec("torch") is None else set()
    return sorted({*globals(), *_LAZY_IMPORTS} - missing)


__all__ = [
    "EMPTY",
    "B",
    "Cluster",
    "Costs",
    "F",
    "I",
    "Instr",
    "Opcode",
    "PipelineShape",
    "Program",
    "R",
    "RankSchedule",
    "Sizes",
    "Stream",
    "TiedWeights",
    "Timeline",
    "W",
    "activation_bytes_per_layer",
    "check",
    "check_program_sequence",
    "check_replicas",
    "compile",
    "concat",
    "errors",
    "evaluation_program",
    "expand_schedule",
    "find_tied_weights",
    "from_text",
    "greedy_schedule",
    "input_limits",
    "instrument",
    "load_cluster",
    "load_timeline",
    "lower_bound",
    "memory_frontier",
    "overlapped_pair",
    "recognize",
    "save_cluster",
    "save_timeline",
    "schedules",
    "search_schedule",
    "simulate",
    "split_costs",
    "to_text",
    "weave",
    "zero_model_states",
]
