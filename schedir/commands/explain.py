"""The command `explain`: explain why ranks are idle, and simulate changes that shorten the step."""

from __future__ import annotations

import argparse
import shlex
from typing import TYPE_CHECKING, Any

from schedir.commands.common.schedule_options import (
    add_compile_options,
    add_source,
    format_shape_options,
    make_request,
)
from schedir.commands.common.timeline_facts import (
    collect_cost_facts,
    collect_timeline_facts,
    describe_costs,
    suggest_page,
)
from schedir.errors import SchedirError, format_bytes
from schedir.io.option_spelling import option_words
from schedir.io.terminal_output import format_json, format_table
from schedir.predict.possible_saving import compute_saving, describe_saving

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from schedir.io.program_request import Request
    from schedir.ir.cost.costs import Costs
    from schedir.predict.bubble_causes import Floats, IdleCause
    from schedir.predict.timeline import Timeline
    from schedir.predict.what_if import Advice, SimulatedChange
    from schedir.schedule_search.search_results import LowerBound

# The number of printed changes that save time. Changes for which `_describe_recipe` returns lines
# are always printed.
MAX_CHANGES = 3
MIN_SLOW_STAGE_RATIO = 1.5  # A stage is slow if its time is at least this many times the mean.
MAX_RANKS = 16  # The largest number of ranks for which a table of idle shares is printed.
MAX_MEMORY_CHANGES = 5  # The number of printed changes of memory options.
TORCH_FORMAT = "torch-2.13"  # The version of torch's CSV format that contains transfers.

EXAMPLES = """\
  schedir explain one_f_one_b --costs F=1,B=2,send=0.2
  schedir explain run.timeline

The page docs/how-to/speed-up-a-run.md has more.
"""


# Cause of idle time -> what the rank waits for. The glossary has the same causes.
_CAUSES = {
    "warmup": "another rank's compute, before the rank's first backward",
    "cooldown": "another rank's compute, after the rank's last forward; or no more work",
    "imbalance": "another rank's compute, because the rank has less work than the busiest",
    "peer": "another rank's compute, in all other cases",
    "message": "a transfer, a scatter or a gather",
    "reduction": "a reduction of gradients",
    "sum": "a tensor-parallel collective between segments",
    "all_to_all": "an all-to-all of experts",
    "weights": "weights that ZeRO gathers",
    "offload": "a copy from or to the host",
    "disk": "a copy between the host and its disk",
    "snapshot": "the copy of a stage for a checkpoint",
    "step": "weights that the CPU optimizer updates",
    "host": "nothing in the program: the trainer is late (measured runs only)",
}


def format_epilog() -> str:
    """Return the causes of idle time, for `--help`."""
    rows = "".join(f"  {cause:11} {meaning}\n" for cause, meaning in _CAUSES.items())
    return f"\ncauses of idle time, by what a rank waits for\n{rows}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `explain`.

    Args:
        parser: The parser of the command.
    """
    add_source(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_compile_options(parser)


def run(args: argparse.Namespace) -> str:
    """Return lines about idle time, and about changes that would shorten the step.

    Args:
        args: The parsed options of `explain`.

    Returns:
        A text, or JSON with `--json`.
    """
    from schedir.ir.cost.costs import Costs
    from schedir.predict.bubble_causes import idleness
    from schedir.predict.calibrate import calibrate, fill_missing_backwards
    from schedir.predict.what_if import advise

    request = make_request(args, args.source)
    request, limit = _drop_exceeded_limit(request)
    timeline, costs = request.timeline, request.specified_costs
    if costs is None:
        costs = Costs() if request.source_timeline is None else calibrate(timeline)
    costs = fill_missing_backwards(costs, timeline.program)
    advice = advise(timeline, costs, request.schedule, limit)
    lower_bounds = _find_lower_bounds(advice, costs)
    recipes = [_describe_recipe(change, args, request) for change in advice.changes]
    if args.json:
        return format_json(
            _collect_facts(timeline, advice, recipes, lower_bounds) | collect_cost_facts(request)
        )
    idle = idleness(timeline)
    lines = [_describe_bubble(timeline, idle), *_describe_longest_wait(timeline, idle)]
    lines += _describe_ranks(timeline, idle, args.source)
    lines += (
        _describe_advice(advice, recipes, timeline, args.source)
        + _describe_possible_saving(advice, lower_bounds)
        + _describe_memory_changes(advice, limit)
    )
    return "".join(f"{line}\n" for line in lines) + describe_costs([request])


def _drop_exceeded_limit(request: Request) -> tuple[Request, float | None]:
    """Return the request and its memory limit.

    If the program exceeds the limit, the returned request has no limit.

    `explain` reports the changes with which the program fits. This report needs a prediction
    without the limit.

    Raises:
        MemoryLimitError: An option such as `recompute` has the value "fit", and the program still
            exceeds the limit.
    """
    from dataclasses import replace

    from schedir.errors import MemoryLimitError

    try:
        _ = request.timeline
    except MemoryLimitError:
        if "fit" in request.compile_options.values():
            raise
        return replace(request, memory_limit=None), request.memory_limit
    return request, request.memory_limit


def _find_lower_bounds(advice: Advice, costs: Costs) -> list[LowerBound]:
    """Return lower bounds on the spans of schedules with the stages and the memory of the program.

    The memory is the number of activations in flight.

    Returns:
        One bound. If the program has only full backwards, also a second bound for split backwards.
        The list is empty if no bound is known or the advice is not reliable.
    """
    from schedir.ir.isa.instructions import BACKWARD_INPUT
    from schedir.schedule_search.bounds.program_bound import compute_program_bound

    program = advice.baseline.program
    kinds = (False, True) if BACKWARD_INPUT not in program.used_opcodes else (True,)
    bounds = [compute_program_bound(program, costs, split_backward=split) for split in kinds]
    return [bound for bound in bounds if bound is not None] if advice.is_reliable else []


def _describe_possible_saving(advice: Advice, lower_bounds: list[LowerBound]) -> list[str]:
    """Return a line with the most time that another schedule could save, or [] without a bound."""
    shares = [compute_saving(advice.baseline.span, bound.value) for bound in lower_bounds]
    savings = [describe_saving(share) for share in shares]
    if len({*savings}) > 1:
        savings = [f"{savings[0]} with full backwards, {savings[1]} with split backwards"]
    change = "another order of these stages with no more activations"
    return [f"{change} saves {saving}" for saving in savings[:1]]


def _collect_facts(
    timeline: Timeline, advice: Advice, recipes: list[list[str]], lower_bounds: list[LowerBound]
) -> dict[str, Any]:
    from schedir.predict.bubble_causes import IdleCause, idleness, sum_by_cause

    table = sum_by_cause(idleness(timeline), timeline.ranks)
    of_base = collect_timeline_facts(advice.baseline, lower_bounds[0] if lower_bounds else None)
    return collect_timeline_facts(timeline) | {
        "bound": of_base["bound"],
        "gap_to_bound": of_base["gap_to_bound"],
        "split_backward_bound": lower_bounds[-1].value if lower_bounds else None,
        "idle": {cause.text: table[:, cause].tolist() for cause in IdleCause},
        "simulated_span": advice.baseline.span,
        "is_advice_reliable": advice.is_reliable,
        "fits_memory": advice.fits_memory,
        "current": _collect_change_facts(advice.current),
        "changes": [
            _collect_change_facts(change) | {"recipe": recipe}
            for change, recipe in zip(advice.changes, recipes, strict=True)
        ],
        "memory_changes": [_collect_change_facts(change) for change in advice.memory_changes],
    }


def _collect_change_facts(change: SimulatedChange) -> dict[str, Any]:
    run = change.run
    figures = {"span": run.span, "bubble": run.bubble, "memory": change.memory}
    return {"description": change.description, "saved_share": change.saved_share} | figures


def _describe_recipe(
    change: SimulatedChange, args: argparse.Namespace, request: Request
) -> list[str]:
    """Return lines that describe how to make a change.

    For a change of transfers these are commands. For a progress model, the line names transports.
    Other changes have no lines.
    """
    from schedir.analysis.progress_models import get_model_row
    from schedir.io import torch_csv
    from schedir.ir.cost.costs import Costs
    from schedir.ir.program import Program
    from schedir.predict.calibrate import format_costs

    row, program = change.row, change.run.program
    if row.progress_model is not None:
        return [
            f"progress model {row.progress_model}: {get_model_row(row.progress_model).transports}"
        ]
    if row.kind not in ("transfers", "grouped") or request.compile_options:
        return []
    costs, overlap = row.transfer_costs, row.kind == "grouped"
    is_program = isinstance(request.source.schedule_or_program, Program)
    options = ["--relower"] * is_program
    if request.specified or not is_program:
        options += format_shape_options(program, request.specified)
    if args.buffer_sharing is not None:
        options += option_words("buffer_sharing", args.buffer_sharing)
    words = [args.source, *options] + option_words("overlap") * overlap
    # A program file contains no progress model, so the command must name the model.
    default_model = (
        "per_device" if request.source_timeline is None else request.source_timeline.progress_model
    )
    if (model := args.progress_model or default_model) != "per_device":
        words += ["--progress-model", model]
    command = f"schedir print {shlex.join(words)}"
    if (
        costs is not None
        and request.source_timeline is not None
        and request.specified_costs is None
    ):
        command += f' --costs "$(schedir calibrate {shlex.quote(args.source)})"'
    elif costs is not None:
        default_costs = format_costs(Costs()).split(",")
        changed_costs = [
            part for part in format_costs(costs).split(",") if part not in default_costs
        ]
        command += f" --costs {','.join(changed_costs)}"
    lines = [f"{command} -o other.sched"]
    try:
        torch_csv.to_csv(program, TORCH_FORMAT)
    except SchedirError:
        return lines
    return [
        *lines,
        f"for torch: schedir export other.sched --to {TORCH_FORMAT} -o other.csv",
        'then, without FSDP: schedule._load_csv("other.csv", format="compute_comms")',
    ]


def _describe_bubble(timeline: Timeline, idle: Any) -> str:
    """Return a line with the bubble and its causes, the largest cause first."""
    from schedir.predict.bubble_causes import sum_by_cause

    total_time = timeline.span * timeline.ranks
    share = sum_by_cause(idle, timeline.ranks).sum(0) / (total_time or 1.0)
    printed_causes = _list_printed_causes(share)
    causes = ", ".join(f"{c.text} {share[c]:.1%}" for c in printed_causes)
    return (
        f"{timeline.program.name}, {timeline.caption}, progress model "
        f"{timeline.progress_model}: {timeline.bubble:.1%} of "
        f"{_describe_total(timeline)} is idle{causes and f': {causes}'}"
    )


def _describe_total(timeline: Timeline) -> str:
    """Return the total time of all ranks as text, such as "4 ranks x 33"."""
    unit = timeline.unit and f" {timeline.unit}"
    return f"{timeline.ranks} rank{'s' * (timeline.ranks > 1)} x {timeline.span:.6g}{unit}"


def _list_printed_causes(share: Floats) -> list[IdleCause]:
    """Return the causes whose printed share is above 0.0 %, the largest first."""
    from schedir.predict.bubble_causes import IdleCause

    return sorted((c for c in IdleCause if share[c] >= 0.0005), key=lambda c: -share[c])


def _describe_ranks(timeline: Timeline, idle: Any, source: str) -> list[str]:
    """Return the lines of a table with the idle shares of each rank.

    For many ranks, return one line with a command that shows these shares.
    """
    from schedir.predict.bubble_causes import sum_by_cause

    if timeline.ranks > MAX_RANKS:
        picture = f"schedir draw {shlex.quote(source)} --idle-map -o idle.png"
        return [f"causes of each rank: --json, or {picture}"]
    share = sum_by_cause(idle, timeline.ranks) / (timeline.span or 1.0)
    causes = _list_printed_causes(share.mean(0))
    if not causes or timeline.ranks == 1:
        return []
    rows = [
        [
            f"rank {rank}",
            f"{rank_share.sum():.1%}",
            *(f"{rank_share[cause]:.1%}" for cause in causes),
        ]
        for rank, rank_share in enumerate(share)
    ]
    headings = ["share of the span", "idle", *(cause.text for cause in causes)]
    return format_table(headings, rows).splitlines()


def _describe_longest_wait(timeline: Timeline, idle: Any) -> list[str]:
    """Return a line with the instruction for which ranks wait longest, over all microbatches."""
    import numpy as np

    from schedir.ir.isa.instructions import COMPUTE_OPS, INSTRUCTIONS

    spans = timeline.spans
    idle = idle[idle["awaited_span"] >= 0]
    idle = idle[np.isin(spans["op"][idle["awaited_span"]], COMPUTE_OPS)]
    if not len(idle):
        return []
    awaited = spans[["rank", "op", "stage"]][idle["awaited_span"]]
    kinds, kind_of_wait = np.unique(awaited, return_inverse=True)
    waited = np.bincount(kind_of_wait, idle["end"] - idle["start"])
    rank, op, stage = kinds[waited.argmax()].tolist()
    durations = spans["end"] - spans["start"]
    pair = timeline.is_second_of_pair.copy()
    pair[:-1] |= pair[1:]
    # Two instructions that run together share one time, so both are left out.
    is_same_op = (spans["op"] == op) & ~pair
    stage_times, comparison = durations[is_same_op & (spans["stage"] == stage)], ""
    name, lines = INSTRUCTIONS[op].text, []
    if (
        len(stage_times)
        and abs(stage_times.mean() - durations[is_same_op].mean())
        > 0.01 * durations[is_same_op].mean()
    ):
        ratio = stage_times.mean() / durations[is_same_op].mean()
        comparison = f"; it takes {ratio:.2f}x the mean of all {name}"
        # Ranks may wait for a fast stage only because this stage waits for a slow stage.
        if ratio < 1:
            lines = _describe_slow_stage(spans[is_same_op], durations[is_same_op], name)
    if not timeline.idle.sum() > 0:  # The waits are so short that they round to 0.
        return []
    share = waited.max() / (timeline.span * timeline.ranks)
    return [
        *lines,
        f"longest awaited: {name} of stage {stage} on rank {rank}, for "
        f"{share:.1%} of {_describe_total(timeline)}{comparison}",
    ]


def _describe_slow_stage(spans: NDArray[Any], durations: NDArray[Any], name: str) -> list[str]:
    """Return a line about the stage that takes much longer than the mean, or [].

    Args:
        spans: The instructions of one opcode.
        durations: The time of each of these instructions.
        name: The name of the opcode.
    """
    import numpy as np

    numbers, first, stage_index = np.unique(spans["stage"], return_index=True, return_inverse=True)
    ratios = np.bincount(stage_index, durations) / np.bincount(stage_index) / durations.mean()
    slowest = int(ratios.argmax())
    if ratios[slowest] < MIN_SLOW_STAGE_RATIO:
        return []
    rank = spans["rank"][first[slowest]]
    return [
        f"slow stage: {name} of stage {numbers[slowest]} on rank {rank} takes "
        f"{ratios[slowest]:.2f}x the mean of all {name}"
    ]


def _describe_advice(
    advice: Advice, recipes: list[list[str]], timeline: Timeline, source: str
) -> list[str]:
    """Return lines with the changes that save the most time, and the error of the simulation."""
    from schedir.predict.calibrate import MIN_REPORTED_SHARE, compute_unexplained_share
    from schedir.predict.what_if import MAX_COMPILED_INSTRUCTIONS, MIN_SAVING

    base, unit = advice.baseline, timeline.unit and f" {timeline.unit}"
    if not advice.is_reliable:
        return [
            f"no advice: a simulation at the run's mean times takes {base.span:.6g}{unit}, but the "
            f"run took {timeline.span:.6g}{unit} ({advice.relative_error:+.1%}), so it cannot "
            f"predict what a change saves; {suggest_page(source)}"
        ]
    off = (
        f"{abs(advice.relative_error):.1%} {'more' if advice.relative_error > 0 else 'less'} "
        "than the run"
    )
    lines = []
    if timeline.kind != "predicted":
        lines = [f"a simulation at the run's mean times takes {base.span:.6g}{unit}, {off}"]
        if (lost := compute_unexplained_share(base, timeline)) >= MIN_REPORTED_SHARE:
            lines[0] += f"; {lost:.1%} of the ranks' time is unexplained and counts as work"
    # A saving below the error of the simulation may be noise.
    min_saving = max(MIN_SAVING, abs(advice.relative_error))
    best = [
        (k, change) for k, change in enumerate(advice.changes) if change.saved_share >= min_saving
    ]
    untried = ""
    if len(base.program) > MAX_COMPILED_INSTRUCTIONS:
        untried = f"; other orders of {len(base.program):,} instructions are not tried"
    if not best:
        return [
            *lines,
            f"no tried change saves {min_saving:.1%} of the time, by simulation{untried}",
        ]
    lines.append(
        "changes, with the share of the time per microbatch that each saves, by simulation"
        f"{untried}:"
    )
    for k, (change_index, change) in enumerate(best):
        if k < MAX_CHANGES or recipes[change_index]:
            lines += [
                f"  {change.saved_share:6.1%}  {change.description}: {change.describe()}",
                *(f"{'':10}{recipe_line}" for recipe_line in recipes[change_index]),
            ]
    return lines


def _describe_memory_changes(advice: Advice, memory_limit: float | None) -> list[str]:
    """Return a heading, and a line for each change that makes the program fit or saves memory."""
    current = advice.current
    if not advice.fits_memory and memory_limit is not None:
        head = f"the program does not fit into {format_bytes(memory_limit)}: {current.describe()}; "
        head += (
            "changes that fit, by simulation:" if advice.memory_changes else "no tried change fits"
        )
    elif advice.memory_changes:
        head = f"now: {current.describe()}; changes that take less time or memory, by simulation:"
    else:
        return []
    return [head] + [
        f"  {change.run.span / current.run.span - 1:+7.1%}  "
        f"{change.description}: {change.describe()}"
        for change in advice.memory_changes[:MAX_MEMORY_CHANGES]
    ]
