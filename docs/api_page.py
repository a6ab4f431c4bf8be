"""Generate the reference of all public names. `generate.py` writes the page.

A name is public if the `__all__` of a public module lists it.  `docs/reference/api.md` has tables
of the public names, each with the first sentence of its docstring, for readers of the repository.
On the site `sphinx.ext.autodoc` renders each of them in full: `docs/conf.py` replaces the tables by
headings and directives.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import ModuleType

import schedir
from docs import pages

# The modules whose `__all__` is public, as users write them after `schedir.`.
MODULES = (
    "schedule_algebra",
    "viz",
    "runtime",
    "checkpoints",
    "planner",
    "schedules",
    "testing",
    "torch_csv",
    "traces",
)
# Each public name is in one group.  Constants of one module are one entry.
GROUPS = {
    "Write schedules": (
        "A schedule is a function of (rank, ranks, microbatches) that returns a RankSchedule, the "
        "work of one rank. A *draft* has the work of all ranks, before `compile` adds "
        "communication. "
        "[The tutorial](../tutorials/first-schedule.md) shows how to write a schedule.",
        ["PipelineShape", "F, B, I, W, R, EMPTY", "RankSchedule", "weave", "overlapped_pair",
         "concat",
         "schedule_algebra.with_placement", "schedule_algebra.with_weight_delay", "greedy_schedule",
         "schedules", "expand_schedule"],
    ),
    "Compile and check": (
        "`compile` turns a schedule into a Program: an instruction list (a Stream) per rank. "
        "[Instructions](instructions.md) lists the instructions, and "
        "[the page about the checker](../explanation/checker.md) explains the checks. "
        "[File formats](file-formats.md#programs-sched) describes the text of a program.",
        ["compile", "evaluation_program", "recognize", "check", "check_program_sequence",
         "check_replicas", "errors", "Program", "Stream", "Instr",
         "Opcode", "to_text", "from_text", "input_limits", "find_tied_weights", "TiedWeights",
         "torch_csv.to_csv", "torch_csv.from_csv"],
    ),
    "Predict and measure": (
        "Predicted and measured runs are both a `Timeline`. "
        "[File formats](file-formats.md#timelines-timeline) describes the file of a Timeline.",
        ["Costs", "Sizes", "split_costs", "Cluster", "load_cluster", "save_cluster",
         "zero_model_states",
         "activation_bytes_per_layer", "simulate", "Timeline",
         "save_timeline", "load_timeline", "traces.read_run", "traces.ImportedRun"],
    ),
    "Search": (
        "[Search for a schedule](../how-to/search-for-a-schedule.md) shows how to use these "
        "functions. A lower bound is a proven time: no schedule takes less.",
        ["search_schedule", "lower_bound", "memory_frontier"],
    ),
    "Plan": (
        "A plan has the parallel degrees, the schedule and the memory options of a training run. "
        "The page [Plan a cluster](../how-to/plan-a-cluster.md) shows examples.",
        ["planner.plan", "planner.prefer_simplest", "planner.estimate_step",
         "planner.TransformerSpec", "planner.load_model",
         "planner.ParallelPlan",
         "planner.PlanEstimate", "planner.StepBreakdown", "planner.StateBytes", "planner.GpuMemory",
         "planner.cluster_preset",
         "planner.cluster_presets",
         "planner.SoftwareConstants", "planner.HostMemory", "planner.train_config",
         "planner.optimize_layer_division", "planner.embedding_time",
         "planner.all_plans", "planner.simulate_plan", "planner.head_time", "planner.layer_time",
         "planner.peak_memory",
         "planner.launcher_options", "planner.plan_program", "planner.simulated_program",
         "planner.prediction_regret", "planner.find_step_errors", "planner.StepErrors",
         "planner.improve_schedule", "planner.stage_time", "planner.calibrate",
         "planner.Calibration", "planner.CalibratedConstant", "planner.MeasuredRun",
         "planner.stack_preset", "planner.stack_presets", "planner.Stack"],
    ),
    "Instrument other trainers": (
        "The page [Instrument a trainer](../how-to/instrument-a-trainer.md) shows how to record "
        "runs of torch.distributed.pipelining, Megatron-LM and DeepSpeed as Timelines.",
        ["instrument"],
    ),
    "Draw": (
        "The page [Draw pictures](../how-to/draw-pictures.md) has examples for the shell and for "
        "Python.",
        ["viz.gantt", "viz.compare", "viz.Style", "viz.idle_map", "viz.bubble_vs_memory",
         "viz.memory_frontier", "viz.plan_times", "viz.plan_memory", "viz.plan_scaling",
         "viz.window_tiles", "viz.save", "viz.text_chart", "viz.html", "viz.save_html",
         "viz.widget"],
    ),
    "Run": (
        "The page [Train your own model](../how-to/train-your-own-model.md) shows how to run a "
        "model in one process, and in four.",
        ["runtime.InProcessExecutor", "runtime.Executor", "runtime.GradientOptions",
         "runtime.ExecutionOptions", "runtime.Boundary", "runtime.PerMicrobatchBoundary",
         "runtime.infer_boundaries", "runtime.run_sequential", "runtime.measure_sizes",
         "runtime.make_backward_splittable", "runtime.register_splittable_layer",
         "runtime.check_splittable_layer",
         "runtime.GlooTransport", "runtime.SharedMemoryTransport", "runtime.nccl_transport"],
    ),
    "Save checkpoints": (
        "Any layout of ranks can load a [checkpoint](../how-to/save-and-resume.md).",
        ["checkpoints.save", "checkpoints.load", "checkpoints.Saver"],
    ),
    "Test": (
        "The pages [Test a schedule](../how-to/test-a-schedule.md) and "
        "[Compare gradients](../how-to/compare-gradients.md) show how to use these functions.",
        ["testing.assert_schedule", "testing.assert_same_gradients",
         "testing.shapes_for", "testing.shapes", "testing.compute_programs",
         "testing.programs", "testing.tied_weights", "testing.random_compute_program",
         "testing.compile_options"],
    ),
}  # fmt: skip

# More options of a directive.
OPTIONS = {
    "viz.Style": ":undoc-members:",  # a TypedDict: its keys are no parameters
}


def list_public_names() -> dict[str, object]:
    """Return each public object by its shortest name, as users write it after `schedir.`."""
    names: dict[str, object] = {}
    listed: set[tuple[int, str]] = set()
    for prefix, module in [("", schedir), *((f"{m}.", attrgetter(m)(schedir)) for m in MODULES)]:
        for name in module.__all__:
            value = getattr(module, name)
            if (id(value), name) not in listed:
                listed.add((id(value), name))
                names[prefix + name] = value
    return names


def is_constant(value: object) -> bool:
    """Return whether a public name is neither a module, a class nor a function."""
    return not (inspect.ismodule(value) or inspect.isclass(value) or inspect.isroutine(value))


def get_docstring(value: object) -> str:
    """Return the docstring of a public name. A constant has the docstring of its module."""
    documented = sys.modules[type(value).__module__] if is_constant(value) else value
    if not documented.__doc__:
        raise ValueError(f"{value!r} is public, and has no docstring")
    return inspect.cleandoc(documented.__doc__)


def format_summary(titles: list[str], values: dict[str, object]) -> str:
    """Return a table of names with links to their sources, and their first sentences.

    A row has the same link target as the heading of the name on the site.
    """
    rows = []
    for title in titles:
        value = values[title.split(", ")[0]]
        module = value if inspect.ismodule(value) else sys.modules[_find_module_name(value)]
        path = Path(str(module.__file__)).resolve().relative_to(pages.ROOT)
        anchor = "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c in "-_")
        sentence = pages.get_first_sentence(get_docstring(value)).replace("|", "\\|")
        rows.append([f'<a id="{anchor}"></a>[`{title}`](../../{path})', sentence])
    return pages.format_table(["name", "description"], rows)


def _find_module_name(value: object) -> str:
    """Return the name of the module that defines a public name."""
    return (type(value) if is_constant(value) else value).__module__


def format_directives(titles: list[str], values: dict[str, object]) -> str:
    """Return the headings of names, each with the directive by which autodoc renders it."""
    return "\n\n".join(
        f"### {title}\n\n{format_directive(title, values[title.split(', ')[0]])}"
        for title in titles
    )


def format_directive(title: str, value: object) -> str:
    """Return the directive by which autodoc renders an entry."""
    options = ""
    if is_constant(value):
        line = f"automodule:: {type(value).__module__}"
        options = f"\n   :members: {title}"
    elif isinstance(value, ModuleType):
        line = f"automodule:: {value.__name__}"
        options = f"\n   :members: {', '.join(list_members(value))}\n   :show-inheritance:"
    else:
        line = f"auto{'class' if inspect.isclass(value) else 'function'}:: schedir::{title}"
        options = "\n   :members:" if inspect.isclass(value) else ""
        options += f"\n   {OPTIONS[title]}" if title in OPTIONS else ""
    return f"```{{eval-rst}}\n.. {line}{options}\n```"


def list_members(module: ModuleType) -> list[str]:
    """Return the public names of a module: its `__all__`, or the classes that it defines."""
    classes = [
        n for n, v in vars(module).items() if inspect.isclass(v) and v.__module__ == module.__name__
    ]
    return list(getattr(module, "__all__", classes))


def build_blocks(
    note: str, entries: Callable[[list[str], dict[str, object]], str]
) -> dict[str, str]:
    """Return the note, and all groups with the text `entries(titles, values)` of their names."""
    values = list_public_names()
    listed = [n for _, titles in GROUPS.values() for title in titles for n in title.split(", ")]
    expected = sorted(name for name in values if not name.startswith("schedules."))
    assert sorted(listed) == expected, {*listed} ^ {*expected}
    groups = []
    for heading, (intro, titles) in GROUPS.items():
        groups.append(f"## {heading}\n\n{intro}\n\n{entries(titles, values)}")
    return {"note": note, "groups": "\n\n".join(groups)}


SUMMARY_NOTE = """\
- The tables link to the source, which has signatures, arguments and examples. The site that
  `make docs` builds also has them."""
PAGES = pages.define_page("reference/api", partial(build_blocks, SUMMARY_NOTE, format_summary))
SITE = pages.define_page(
    "reference/api", partial(build_blocks, "- Every example is a test.", format_directives)
)["reference/api.md"]
