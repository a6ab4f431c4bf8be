"""Report parallel plans as tables and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from itertools import groupby, zip_longest
from math import floor, log10
from textwrap import fill
from typing import TYPE_CHECKING, Any, Final

from schedir.errors import format_bytes
from schedir.io.terminal_output import format_json, format_table, join_words
from schedir.planner.estimate.schedule_formulas import DEFAULT_SCHEDULES, SCHEDULE_FORMULAS
from schedir.planner.hardware.step_time_errors import INTERVAL_SHARE, StepErrors, find_step_errors
from schedir.planner.parallel_plan import GpuMemory, StepBreakdown
from schedir.planner.plan_simplicity import PREFERENCE_TOLERANCE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from schedir.commands.common.plan_request import PlanRequest
    from schedir.ir.cost.cluster import Cluster
    from schedir.planner import PlanEstimate

# The printed names of the parts of a step, and of the parts of the memory of a GPU.
_STEP_PART_NAMES: Final = dict(
    zip(
        StepBreakdown._fields,
        (
            "compute",
            "recompute",
            "layer collectives",  # `_name_step_parts` replaces this name.
            "messages",
            "bubble",
            "replicas",
            "optimizer",
            "host copies",
            "data loading",
        ),
        strict=True,
    )
)
_MEMORY_PART_NAMES: Final = dict(
    zip(
        GpuMemory._fields,
        ("weights", "gradients", "optimizer", "activations", "buffers", "allocator", "process"),
        strict=True,
    )
)
# Columns (heading, field, usual value) that are printed only if a plan has another value.
_RARE_COLUMNS: Final = (("cp", "cp", 1), ("ep", "ep", 1), ("SP", "sequence_parallel", False))
LAST_COLUMNS: Final = (
    ("offload", "offload", "none"),
    ("optimizer", "optimizer_placement", "device"),
)
_BYTE_UNITS: Final = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_TIME_UNITS: Final = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_DURATION_UNITS: Final = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"))
_INTERVAL_NAME: Final = f"{100 * INTERVAL_SHARE:g} % of runs"
# The meanings of headings that are not words.
_COLUMN_MEANINGS: Final = {
    "pp": "pipeline ranks", "tp": "tensor-parallel ranks", "cp": "parts of each sequence",
    "ep": "ranks that share the experts", "SP": "sequence parallel", "dp": "replicas",
    "v": "stages per rank", "b": "microbatch size", "m": "microbatches",
}  # fmt: skip
_MAX_SENTENCE_WIDTH: Final = 110  # About the width of the table of plans.
_MAX_OPTION_LENGTH: Final = 100  # The rest of a longer option is not printed; `--json` has all.
# The first part of a name of `--stack` -> keys of `launcher_options`.
_TRAINERS: Final = {
    "megatron": ("megatron", "nemo"), "torchtitan": ("torchtitan",), "nanotron": ("nanotron",),
}  # fmt: skip
_TRAINER_NAMES: Final = {
    "megatron": "Megatron-LM", "nemo": "NeMo (Megatron Bridge)", "torchtitan": "torchtitan",
    "nanotron": "nanotron",
}  # fmt: skip


def format_seconds(time: float) -> str:
    """Return a time with its unit, for a table or a sentence.

    Args:
        time: The time in seconds.

    Example:
        >>> [format_seconds(seconds) for seconds in (31.234, 3.1, 0.00312, 2.55e-5)]
        ['31.23 s', '3.100 s', '3.120 ms', '25.5 us']
    """
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if time >= scale:
            return f"{time / scale:#.4g} {unit}".replace(". ", " ")
    return f"{1e6 * time:.3g} us"


def _format_interval(errors: StepErrors, step_time: float) -> str:
    """Return the interval of a step time with its unit.

    Args:
        errors: The errors to expect.
        step_time: The predicted step time in seconds.

    Example:
        >>> errors = StepErrors(-0.1, 0.25, 0.2, "some runs")
        >>> [_format_interval(errors, seconds) for seconds in (31.234, 0.9, 2.55e-5)]
        ['28.1-39.0 s', '0.810-1.12 s', '22.9-31.9 us']
    """
    low, high = errors.find_interval(step_time)
    scale, unit = _choose_unit(high, _TIME_UNITS)
    return "-".join(_format_three_digits(time / scale) for time in (low, high)) + f" {unit}"


def _choose_unit(value: float, units: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """Return the largest unit that is at most a value, or the smallest unit."""
    return next((unit for unit in units if value >= unit[0]), units[-1])


def _format_three_digits(number: float) -> str:
    """Return a number with three digits, or with all digits of its integer part."""
    return f"{number:.{max(0, 2 - floor(log10(number)))}f}"


def format_teraflops(flops_per_second: float) -> str:
    """Return a speed in TFLOP/s, for a table. Speeds of CPUs can be far below 1 TFLOP/s.

    Args:
        flops_per_second: The speed in FLOP/s.

    Example:
        >>> [format_teraflops(speed) for speed in (188e12, 1.84e12, 2.553e10)]
        ['188.0', '1.8', '0.0255']
    """
    teraflops = flops_per_second / 1e12
    return f"{teraflops:.1f}" if teraflops >= 1 else f"{teraflops:.3g}"


def describe_plan(plan: PlanEstimate) -> str:
    """Return a phrase with the parallel degrees, the schedule and the memory options of a plan.

    Args:
        plan: The plan.
    """
    parts = [f"{plan.pp} pipeline rank{'s' * (plan.pp > 1)}"]
    parts += [f"{plan.tp} tensor-parallel ranks"] * (plan.tp > 1)
    parts += [f"{plan.cp} parts of each sequence"] * (plan.cp > 1)
    experts = f" (groups of {plan.ep} share the experts)" * (plan.ep > 1)
    parts += [f"{plan.dp} replicas{experts}"] * (plan.dp > 1)
    v = f" with {plan.stages_per_rank} stages per rank" if plan.stages_per_rank > 1 else ""
    text = f"{' x '.join(parts)}, {plan.schedule}{v}, "
    text += (
        f"{plan.microbatches} microbatch{'es' * (plan.microbatches > 1)} of {plan.microbatch_size}"
    )
    text += ", sequence parallel" * plan.sequence_parallel
    if plan.recompute != "none":
        text += f", recompute {plan.recompute}"
    text += f", ZeRO {plan.zero}{' (as FSDP)' * (plan.zero == 3)}" if plan.zero else ""
    text += ", activations offloaded" * (plan.offload != "none")
    return text + ", optimizer state on the host" * (plan.optimizer_placement != "device")


def format_plans(
    request: PlanRequest,
    plans: Sequence[PlanEstimate],
    selected_number: int,
    tokens: float | None,
    fastest: PlanEstimate | None = None,
) -> str:
    """Return the table of plans, and the details of one of them.

    Args:
        request: The request of the plans.
        plans: The plans, the preferred plan first.
        selected_number: The number of the plan whose details are printed, from 1.
        tokens: The number of tokens of the training run. If this number is given, the duration of
            the run is printed.
        fastest: The fastest plan. A line describes the fastest plan if it is not the first plan.
    """
    model, cluster = request.model, request.cluster
    plan = plans[selected_number - 1]
    errors = find_step_errors(cluster, request.stack)
    nodes = f"{cluster.nodes} x {cluster.gpus_per_node}"
    lines = [
        wrap(
            f"{request.display_names[0]}: {_format_count(model.params)} parameters; a step has "
            f"{request.batch:,} "
            f"sequences of {model.sequence:,} tokens; {cluster.gpu_count:,} "
            f"GPU{'s' * (cluster.gpu_count > 1)} of {request.display_names[1]} ({nodes})"
        ),
        _format_table(plans, cluster.memory),
        *map(wrap, describe_speeds(request, errors, cluster.gpu_count)),
        *map(wrap, _list_indistinct_plans(plans, errors)),
        *map(wrap, _describe_preference(plans, fastest)),
        wrap(_describe_schedules(request)),
        *map(wrap, _describe_attention(plan)),
        wrap(_describe_state_bytes(request)),
        "\n",
        wrap(f"plan {selected_number}: {describe_plan(plan)}"),
        *_join_columns(
            _format_step_times(plan, errors),
            [*_format_memory(plan, cluster.memory), *_format_host_memory(plan, cluster)],
        ),
    ]
    lines += [wrap(f"  {line}") for line in _describe_activations(request, plan)]
    lines += [wrap(f"  note: {note}") for note in _list_notes(request, plan)]
    if plan.offload_comparison:
        lines.append(wrap(f"  offload: {plan.offload_comparison}"))
    if plan.explanation:
        lines.append(wrap(f"  bound by {_name_fields(plan.explanation, plan)}"))
    if tokens is not None:
        steps = tokens / (request.batch * model.sequence)
        scale, unit = _choose_unit(steps * plan.step_time, _DURATION_UNITS)
        duration, low, high = (
            steps * seconds / scale
            for seconds in (plan.step_time, *errors.find_interval(plan.step_time))
        )
        lines.append(f"  {_format_count(tokens)} tokens take {steps:,.0f} steps: {duration:,.1f} "
                     f"{unit} ({_INTERVAL_NAME}: {low:,.1f}-{high:,.1f})\n")  # fmt: skip
    lines += [f"  {line}\n" for line in _format_options(request, plan)]
    return "".join(lines)


def _format_table(plans: Sequence[PlanEstimate], limit: float) -> str:
    rare, last = (
        [(name, field) for name, field, usual in columns
         if any(getattr(plan, field) != usual for plan in plans)]
        for columns in (_RARE_COLUMNS, LAST_COLUMNS)
    )  # fmt: skip
    degrees = ["pp", "tp", *(name for name, _ in rare), "dp", "v", "b", "m"]
    meanings = ", ".join(f"{_COLUMN_MEANINGS[name]} ({name})" for name in degrees)
    table = format_table(
        ["plan", *degrees, "schedule",
         "recompute", "ZeRO", *(name for name, _ in last), "step", "TFLOP/s", "MFU", "memory"],
        [
            [
                str(k), str(plan.pp), str(plan.tp),
                *(_format_cell(getattr(plan, field)) for _, field in rare),
                str(plan.dp), str(plan.stages_per_rank), str(plan.microbatch_size),
                str(plan.microbatches), plan.schedule, plan.recompute,
                str(plan.zero), *(_format_cell(getattr(plan, field)) for _, field in last),
                format_seconds(plan.step_time), format_teraflops(plan.flops_per_second),
                f"{plan.mfu:.1%}",
                f"{plan.memory.total / 1e9:.1f} of {limit / 1e9:.4g} GB",
            ]
            for k, plan in enumerate(plans, 1)
        ],
    )  # fmt: skip
    return table + wrap(f"columns: {meanings}")


def wrap(sentence: str) -> str:
    """Return a sentence in lines of a limited width, with a newline at the end of each line.

    The second and later lines are indented by two spaces more than the first.

    Args:
        sentence: The sentence, without a newline.
    """
    indent = " " * (len(sentence) - len(sentence.lstrip()) + 2)
    return fill(
        sentence, _MAX_SENTENCE_WIDTH, subsequent_indent=indent, break_on_hyphens=False
    ) + "\n"  # fmt: skip


def _describe_preference(
    plans: Sequence[PlanEstimate], fastest: PlanEstimate | None
) -> Iterator[str]:
    """Yield a sentence about the fastest plan, if a simpler plan comes first."""
    if fastest is None or plans[0].step_time <= fastest.step_time:
        return
    alike = (
        f"plan {k}" for k, plan in enumerate(plans, 1)
        if (plan.step_time, describe_plan(plan)) == (fastest.step_time, describe_plan(fastest))
    )  # fmt: skip
    yield (
        "plan 1 comes first because it is the simplest plan within "
        f"{100 * PREFERENCE_TOLERANCE:g} % of the fastest; the others are in the order of their "
        f"step times. The fastest takes {format_seconds(fastest.step_time)}: "
        f"{next(alike, describe_plan(fastest))}"
    )


def describe_speeds(request: PlanRequest, errors: StepErrors, max_gpus: int) -> Iterator[str]:
    """Yield sentences about the columns of step times and speeds.

    Args:
        request: The request of the plans.
        errors: The errors to expect of their step times.
        max_gpus: The number of GPUs of the plan with the most GPUs.
    """
    calibrated_gpus = request.cluster.calibrated_gpus
    if calibrated_gpus and max_gpus > calibrated_gpus:
        yield (
            f"note: {max_gpus:,} GPUs are an extrapolation: the cluster is calibrated with runs on "
            f"at most {calibrated_gpus:,}"
        )
    advice = "--calibrate RUNS.csv computes this range from your own runs"
    if not request.stack:
        advice = "--stack NAME or --calibrate RUNS.csv makes the range smaller"
    yield (
        f"step: {_INTERVAL_NAME} take {1 + errors.low:.2f} to {1 + errors.high:.2f} times the "
        f"prediction, as for {errors.source}" + f"; {advice}" * (not request.cluster.uncertainty)
    )
    constants = request.software["constants"]
    for precision in ("fp8", "fp4"):
        if constants is not None and getattr(constants, f"{precision}_speedup") > 1:
            yield (
                f"MFU: the share of the peak in 16 bits; products in {precision.upper()} are "
                "faster, so MFU can be above 100 %"
            )


def _list_indistinct_plans(plans: Sequence[PlanEstimate], errors: StepErrors) -> Iterator[str]:
    """Yield a sentence with the plans that may be as fast as the fastest, if there are several."""
    positions = errors.find_indistinct_plans(plans)
    if len(positions) > 1:
        numbers = join_words([str(k + 1) for k in positions])
        yield (
            f"plans {numbers}, the simplest first, may be equally fast: predictions cannot order "
            f"steps that differ by less than {100 * errors.resolution:.0f} %"
        )


def _describe_schedules(request: PlanRequest) -> str:
    """Return a sentence about the schedules that were tried, and others that can be tried."""
    tried_names = request.planner_options.get("schedules", DEFAULT_SCHEDULES)
    other_names = [name for name in SCHEDULE_FORMULAS if name not in tried_names]
    also = f"; --schedules also takes {', '.join(other_names)}" if other_names else ""
    return f"schedules tried: {', '.join(tried_names)}{also}"


def _describe_attention(plan: PlanEstimate) -> Iterator[str]:
    """Yield a sentence about the attention that the plans assume, if it is not flash attention."""
    if plan.attention == "softmax":
        scores = "which saves all scores" if plan.recompute == "none" else "which recomputes scores"
        yield (
            f"attention: softmax, {scores}; --attention flash plans the fused kernels that most "
            "software has"
        )


def _describe_state_bytes(request: PlanRequest) -> str:
    """Return a sentence about the bytes of a parameter, which depend on the software."""
    from schedir.planner.transformer.memory_estimate import get_state_bytes

    states = request.software["state_bytes"] or get_state_bytes(request.cluster)
    text = (
        f"bytes per parameter: {states.params:g} weight, {states.grads:g} gradient, "
        f"{states.optimizer:g} optimizer state"
    )
    return text + "; other trainers may use more (--stack)" * (not request.stack)


def _format_cell(value: int | str) -> str:
    return ("yes" if value else "-") if isinstance(value, bool) else str(value)


def _format_step_times(plan: PlanEstimate, errors: StepErrors) -> list[str]:
    """Return the step time with its interval, and a line for each part, the longest first."""
    rows = _format_parts(plan.breakdown._asdict(), _name_step_parts(plan), _TIME_UNITS)
    interval = f"({_INTERVAL_NAME}: {_format_interval(errors, plan.step_time)})"
    simulated = ", simulated" * plan.is_simulated
    return [f"step {format_seconds(plan.step_time)} {interval}{simulated}", *rows]


def _name_step_parts(plan: PlanEstimate) -> dict[str, str]:
    """Return field -> printed name of the parts of a step.

    The name of the layer collectives lists their groups, such as "tensor and expert parallel".
    """
    degrees = {"tensor": plan.tp, "context": plan.cp, "expert": plan.ep}
    groups = [name for name, degree in degrees.items() if degree > 1]
    return _STEP_PART_NAMES | {"layer_collectives": f"{join_words(groups)} parallel"}


def _name_fields(explanation: str, plan: PlanEstimate) -> str:
    """Replace the fields of `StepBreakdown` in an explanation by their printed names."""
    for field, name in _name_step_parts(plan).items():
        if "_" in field:  # The names of the other fields can also be ordinary words.
            explanation = explanation.replace(field, name)
    return explanation


def _format_memory(plan: PlanEstimate, limit: float) -> list[str]:
    """Return the memory of the fullest GPU, and a line for each of its parts, the largest first."""
    rows = _format_parts(plan.memory._asdict(), _MEMORY_PART_NAMES, _BYTE_UNITS)
    total, limit_text = format_bytes(plan.memory.total), format_bytes(limit)
    return [f"memory of the fullest GPU {total} of {limit_text}", *rows]


def _describe_activations(request: PlanRequest, plan: PlanEstimate) -> Iterator[str]:
    """Yield the activations of each pipeline rank and the part of the loss.

    Plans with offload and searched schedules have no formulas for these numbers.
    """
    from schedir.planner.transformer.memory_estimate import (
        compute_loss_bytes,
        estimate_by_rank,
        get_state_bytes,
    )

    if plan.has_offload or plan.schedule not in SCHEDULE_FORMULAS:
        return
    model, cluster, software = request.model, request.cluster, request.software
    itemsize = (software["state_bytes"] or get_state_bytes(cluster)).params
    loss_bytes = compute_loss_bytes(model, plan, software["constants"], itemsize)
    ranks = estimate_by_rank(model, cluster, plan, **software)
    scale, unit = _choose_unit(max(rank.activations for rank in ranks), _BYTE_UNITS)
    sizes = [f"{rank.activations / scale:.3g}" for rank in ranks]
    if plan.pp > 1:
        yield (
            f"activations of pipeline ranks 0 to {plan.pp - 1}, by formula: "
            f"{_format_repeats(sizes)} {unit}"
        )
    yield f"logits and loss: {format_bytes(loss_bytes)} of the activations of the last stage"


def _format_host_memory(plan: PlanEstimate, cluster: Cluster) -> Iterator[str]:
    """Yield a line for each part of the host memory of a GPU, if the plan uses host memory."""
    if plan.host_memory.total:
        yield (
            f"host {format_bytes(plan.host_memory.total)} of "
            f"{format_bytes(cluster.host_memory or 0.0)}"
        )
        yield from _format_parts(plan.host_memory._asdict(), _MEMORY_PART_NAMES, _BYTE_UNITS)


def _format_parts(
    parts: dict[str, float], names: dict[str, str], units: Sequence[tuple[float, str]]
) -> Iterator[str]:
    """Yield a line for each part that is not 0, the largest first, with its share of the total.

    All lines have the same unit. `units` has pairs of a factor and the name of a unit.
    """
    total = sum(parts.values())
    scale, unit = _choose_unit(total, units)
    rows = sorted(((value, names[name]) for name, value in parts.items() if value), reverse=True)
    width = max((len(name) for _, name in rows), default=0)
    texts = [f"{value / scale:.3f}" for value, _ in rows]
    for (value, name), text in zip(rows, texts, strict=True):
        yield f"  {name:<{width}}  {text:>{max(map(len, texts))}} {unit}  {value / total:>5.1%}"


def _join_columns(left: list[str], right: list[str]) -> Iterator[str]:
    """Yield lines in which the texts of `left` and `right` are side by side."""
    width = max(map(len, left)) + 6
    for first, second in zip_longest(left, right, fillvalue=""):
        yield f"  {first:<{width}}{second}".rstrip() + "\n"


def _format_options(request: PlanRequest, plan: PlanEstimate) -> Iterator[str]:
    """Yield the layers of each stage if they are uneven, and the options of `--stack`."""
    from schedir.planner import launcher_options

    if len({*plan.layers_per_stage}) > 1:
        yield f"layers of each stage: {_format_repeats(plan.layers_per_stage)}"
    if not request.stack:
        yield (
            "--stack megatron, torchtitan or nanotron prints the options of this trainer, and "
            "--json those of all trainers"
        )
    if request.stack == "schedir":
        yield "-o FILE.toml writes this plan for schedir train, if the model is a GPT"
    options = launcher_options(request.model, plan, stack=request.stack)
    for trainer in _TRAINERS.get(request.stack.partition("-")[0], ()):
        yield f"options of {_TRAINER_NAMES[trainer]}"
        for line in options[trainer].splitlines():
            yield (
                f"  {line}"
                if len(line) <= _MAX_OPTION_LENGTH
                else f"  {line[:_MAX_OPTION_LENGTH]}... (--json prints all)"
            )


def _format_repeats(numbers: Sequence[int | str]) -> str:
    """Return numbers as text, with consecutive equal numbers joined.

    Example:
        >>> _format_repeats((3, 4, 4, 4, 3))
        '3, 3 x 4, 3'
    """
    runs = [(number, len([*alike])) for number, alike in groupby(numbers)]
    return ", ".join(f"{n} x {number}" if n > 1 else f"{number}" for number, n in runs)


def _list_notes(request: PlanRequest, plan: PlanEstimate) -> Iterator[str]:
    """Yield warnings about a plan."""
    if plan.tp > request.cluster.gpus_per_node:
        yield (
            f"tp {plan.tp} is more than the {request.cluster.gpus_per_node} GPUs of a node, so the "
            "tensor-parallel collectives of each layer use the network between nodes"
        )
        # Only plans in which the allocator reclaims memory need exactly the memory of a GPU.
        if request.cluster.memory - plan.memory.total < 1e3:
            yield (
                "the plan uses all memory, so the allocator waits for the GPU before it reuses "
                "memory; the planner does not predict this time"
            )


def _format_count(number: float) -> str:
    """Return a large number with a word for its magnitude.

    Example:
        >>> _format_count(174.6e9), _format_count(1.008e12), _format_count(66e6)
        ('174.6 billion', '1.008 trillion', '66 million')
    """
    names = ((1e12, "trillion"), (1e9, "billion"), (1e6, "million"), (1e3, "thousand"))
    factor, name = next(((factor, name) for factor, name in names if number >= factor), (1, ""))
    return f"{number / factor:.4g} {name}".strip()


def format_plans_json(request: PlanRequest, plans: Sequence[PlanEstimate]) -> str:
    """Return the plans as JSON.

    Args:
        request: The request of the plans.
        plans: The plans, in the order of the table.
    """
    from schedir.planner import launcher_options

    errors = find_step_errors(request.cluster, request.stack)
    return format_json(
        {
            "model": asdict(request.model) | {"params": request.model.params},
            "cluster": asdict(request.cluster) | {"gpus": request.cluster.gpu_count},
            "batch": request.batch,
            "step_errors": errors._asdict(),
            "plans": [
                collect_plan_facts(plan, errors)
                | {"options": launcher_options(request.model, plan, stack=request.stack)}
                for plan in plans
            ],
        }
    )


def collect_plan_facts(plan: PlanEstimate, errors: StepErrors) -> dict[str, Any]:
    """Return all fields of a plan for JSON, with step time and memory as dicts of their parts.

    Args:
        plan: The plan.
        errors: The errors to expect of its step time.
    """
    facts = asdict(plan) | {"step_interval": errors.find_interval(plan.step_time)}
    facts["breakdown"] = plan.breakdown._asdict()
    for tier, memory in (("memory", plan.memory), ("host_memory", plan.host_memory)):
        facts[tier] = memory._asdict() | {"total": memory.total}
    return facts
