"""Compute the answers of a studio: the data that the page shows for a state, as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import isclose
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from schedir.commands.common.bound_report import describe_run_bound, find_lower_bound
from schedir.commands.common.program_options import PROGRAM_OPTIONS
from schedir.commands.common.timeline_facts import describe_costs
from schedir.commands.studio.challenges import judge
from schedir.commands.studio.edits import export_program, find_draft, move_instruction
from schedir.commands.studio.state import (
    CodeError,
    StudioState,
    format_command,
    make_comparison_options,
    make_state_request,
    scale_stage_values,
)
from schedir.compiler.relower import extract_compute, remove_recompute
from schedir.compiler.schedule_recognition import Recognition, recognize
from schedir.errors import CommandHint, SchedirError, UsageError
from schedir.io.program_request import Request
from schedir.io.source_loader import Source
from schedir.ir.cost.cost_fields import COST_BY_OPCODE
from schedir.ir.cost.costs import Cost
from schedir.ir.cost.per_stage_values import from_grid, to_grid
from schedir.ir.isa.instructions import COMPUTE_OPS, Opcode
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.ir.text_format import from_text, to_text
from schedir.passes.splitting.frozen_stages import drop_frozen_backwards
from schedir.passes.splitting.stage_segmentation import split_like
from schedir.predict.calibrate import simulate_at_mean_times
from schedir.predict.simulate import simulate
from schedir.predict.timeline import Timeline
from schedir.predict.what_if import MIN_SAVING, SimulatedChange, advise
from schedir.schedules import get_built_in_schedules, get_summary, suggest_schedules
from schedir.schedules.schedule_expansion import expand_schedule
from schedir.viz.deadlock_diagram import draw_deadlock
from schedir.viz.page_data import describe_runs, describe_texts

MAX_RANKS: Final = 256  # The page would take seconds to draw more ranks.
_MAX_DRAFTS: Final = 16  # The number of drafts of user code that a studio keeps.
_MAX_CHANGES: Final = 5  # The number of changes that the page lists.
# `explain_gap` multiplies each cost by this factor to find its effect on a gap.
_REDUCED_COST_FACTOR: Final = 0.9


@dataclass(frozen=True)
class Studio:
    """Answers the questions of the page. Each question contains the state of the page.

    Args:
        run: The run with which the studio was started, or None.
        expand_code: A function that runs the code of a state in another process, and returns the
            text of its draft. It raises `CodeError`. If None, the studio refuses all code.
    """

    run: Source | None = None
    expand_code: Callable[[StudioState], str] | None = None
    # State as JSON -> text of the draft, for code that has run.
    _drafts: dict[str, str] = field(default_factory=dict, init=False)

    def answer(self, question: object) -> dict[str, Any]:
        """Return the answer to a question of the page.

        Args:
            question: An object with `state`, and perhaps with one of the keys `move`, `export` and
                `explain`. `move` is a list: a rank, the index of an instruction, and the index of
                the instruction before which it is moved. `export` is a format. `explain` is a list:
                a rank, and the index of the instruction after a gap. If `run_code` is False, the
                studio does not run code, and uses the draft of an earlier run.

        Returns:
            Without these keys: the data that the page shows, or an error. For `move`: the data and
            the new state, or an error with `is_refused`. For `export`: a file name and a text. For
            `explain`: see `explain_gap`.
        """
        request = None
        try:
            if not isinstance(question, dict):
                raise UsageError("a question must be a JSON object with a state")
            state = StudioState.from_json(question.get("state", {}))
            request = self.make_request(state, run_code=question.get("run_code") is not False)
            if "move" in question:
                return self._move(state, request, question["move"])
            if "export" in question:
                file, text = export_program(request, question["export"])
                return {"file": file, "text": text}
            if "explain" in question:
                return explain_gap(request, state, *_read_integers(question["explain"], 2))
            return self._describe(request, state)
        except SchedirError as error:
            return {"error": describe_error(error, request)}

    def make_request(self, state: StudioState, *, run_code: bool = True) -> Request:
        """Return the request of a state.

        Args:
            state: The state.
            run_code: If False, raise an error for code that has not run before.

        Raises:
            SchedirError: The state is invalid, or has more ranks than the page can draw quickly.
        """
        request = make_state_request(state, self._load_source(state, run_code))
        if (ranks := request.shape.ranks) > MAX_RANKS:
            raise UsageError(
                f"ranks is {ranks}: the page draws at most {MAX_RANKS} ranks",
                hint="schedir draw draws more ranks",
                fields=["ranks"],
            )
        return request

    def _load_source(self, state: StudioState, run_code: bool) -> Source:
        if state.run:
            if self.run is None:
                raise UsageError(
                    "this studio was started without a run: start it with a FILE.timeline",
                    fields=["run"],
                )
            return self.run
        if state.program:
            return Source.from_loaded(from_text(state.program), "the program")
        if state.code:
            return Source.from_loaded(from_text(self._find_draft(state, run_code)), "the code")
        return load_built_in(state.schedule, "schedule")

    def _find_draft(self, state: StudioState, run_code: bool) -> str:
        """Return the text of the draft of the code of a state, from a cache if possible."""
        if self.expand_code is None:
            raise CodeError("this studio was started with --no-code, so it does not run code")
        options = {
            name: text
            for name, text in state.options.items()
            if name in PROGRAM_OPTIONS and PROGRAM_OPTIONS[name].is_shape_option
        }
        state = StudioState(code=state.code, function=state.function, options=options)
        key = json.dumps(state.to_json(), sort_keys=True)
        if key not in self._drafts:
            if not run_code:
                raise CodeError("this code did not run with these options yet", hint="press Run")
            draft = self.expand_code(state)
            for old_key in [*self._drafts][: 1 - _MAX_DRAFTS]:
                self._drafts.pop(old_key, None)
            self._drafts[key] = draft
        return self._drafts[key]

    def _describe(self, request: Request, state: StudioState) -> dict[str, Any]:
        """Return the data for a request, with a second run if the state has a comparison."""
        if not state.other or state.run:
            return describe_request(request, state)
        options = make_comparison_options(state, request.program)
        options.pop("placement", None)
        other_state = replace(state, options=options)
        source = load_built_in(state.other, "other")
        try:
            compared = make_state_request(other_state, source, for_comparison=True).timeline
        except SchedirError as error:
            error.fields, error.program = ("other",), ""
            error.fact = f"{state.other}: {error.fact}"
            raise
        return describe_request(request, state, compared)

    def _move(self, state: StudioState, request: Request, move: object) -> dict[str, Any]:
        """Return the data for the state after a move, or an error if the move is impossible."""
        moved = move_instruction(request, *_read_integers(move, 3))
        state = replace(state, program=to_text(moved), code="", run=False)
        moved_request = make_state_request(state, Source.from_loaded(moved, "the program"))
        try:
            return self._describe(moved_request, state) | {"state": state.to_json()}
        except SchedirError as error:
            return {"error": describe_error(error, moved_request) | {"is_refused": True}}


def load_built_in(schedule: str, field: str) -> Source:
    """Return the source of a built-in schedule. Raise an error for other names, such as files.

    Args:
        schedule: The name, with the options of the schedule in brackets.
        field: The field of the state that has the name.

    Raises:
        UsageError: There is no such schedule.
    """
    name = schedule.partition("(")[0].strip()
    if name not in get_built_in_schedules():
        hint = suggest_schedules(name, [*get_built_in_schedules()])
        raise UsageError(f"{name!r} is not a built-in schedule", hint=hint, fields=[field])
    source = Source(schedule)
    try:
        _ = source.schedule_or_program
    except SchedirError as error:
        error.fields = (field,)
        raise
    return source


def _read_integers(value: object, count: int) -> list[int]:
    numbers = [*value] if isinstance(value, list) else []
    if len(numbers) != count or not all(type(number) is int for number in numbers):
        raise UsageError(
            f"this part of a question must be a list of {count} integers, not {value!r:.80}"
        )
    return numbers


def describe_request(
    request: Request, state: StudioState, other: Timeline | None = None
) -> dict[str, Any]:
    """Return the data that the page shows for a request: runs, bound, recognition and command.

    Args:
        request: The request.
        state: The input of the studio, from which the request was made.
        other: A second run for a comparison, or None.

    Raises:
        SchedirError: The program is invalid, or does not finish.
    """
    timeline, bound = request.timeline, find_lower_bound(request)
    runs = [timeline]
    if timeline.kind == "measured":
        runs.insert(0, simulate_at_mean_times(timeline))
    if other is not None:
        runs.append(other)
    recognition = recognize(timeline.program)
    mismatch_index = -1
    if recognition.rank >= 0:
        work = np.flatnonzero(np.isin(timeline.program.streams[recognition.rank].op, COMPUTE_OPS))
        mismatch_index = (
            int(work[recognition.compute_index]) if recognition.compute_index < len(work) else -1
        )
    shape = timeline.program.shape
    page = describe_runs(runs, compression=1) | describe_texts(runs)
    return page | {
        "verdict": describe_run_bound(timeline, bound),
        "bound": bound.value if bound else None,
        "bound_explanation": bound.explanation if bound else "",
        "comparison": "" if other is None else compare_runs(timeline, other),
        "challenge": judge(request, state),
        "title": _find_title(state, timeline.program, recognition),
        "recognition": str(recognition),
        "schedule_summary": (
            get_summary(get_built_in_schedules()[recognition.schedule])
            if recognition.is_exact
            else ""
        ),
        "difference": [recognition.rank, mismatch_index] if mismatch_index >= 0 else None,
        "notes": _describe_stages(timeline, other) + describe_costs([request]).splitlines(),
        "progress_model": timeline.progress_model,
        "source_type": _find_source_type(request),
        "ranks": shape.ranks,
        "microbatches": shape.microbatches,
        "stages": shape.stages,
        "command": format_command(state, timeline.program, str(request.source)),
    }


def _find_title(state: StudioState, program: Program, recognition: Recognition) -> str:
    """Return the title of the page: the name of the program, and whether it was edited."""
    is_edited = (
        state.program
        and program.name in get_built_in_schedules()
        and not (recognition.is_exact and recognition.schedule == program.name)
        and not _has_order_of_name(program)
    )
    return f"{program.name}, edited" if is_edited else program.name


def _has_order_of_name(program: Program) -> bool:
    """Return whether a program has the compute order of the built-in schedule with its name.

    Unlike `recognize`, this function divides the stages of the schedule into segments and removes
    the backwards of frozen stages, as in the program.
    """
    try:
        draft = expand_schedule(get_built_in_schedules()[program.name], program.unsegmented_shape)
        draft = replace(split_like(draft, program), frozen_stages=program.frozen_stages)
    except SchedirError:
        return False
    drafts = (drop_frozen_backwards(draft), extract_compute(program))
    one, other = (remove_recompute(compute).streams for compute in drafts)
    return one == other


def _describe_stages(one: Timeline, other: Timeline | None) -> list[str]:
    """Return a note if two compared programs divide the model into different numbers of stages."""
    if other is None or one.program.shape.stages == other.program.shape.stages:
        return []
    stages, other_stages = one.program.shape.stages, other.program.shape.stages
    return [
        f"{other.program.name} divides the same model into {other_stages} stages instead of "
        f"{stages}. So the costs and sizes of its stages are {stages / other_stages:.3g} times "
        f"those of the controls, which are for {one.program.name}."
    ]


def compare_runs(one: Timeline, other: Timeline) -> str:
    """Return a sentence that compares the span and the peak memory of a run with another run.

    Args:
        one: The run.
        other: The run with which `one` is compared.
    """
    name, peaks = "memory", [one.peak_activations, other.peak_activations]
    if one.sizes is not None and other.peak_memory.any():
        peaks = [float(run.peak_memory.max()) for run in (one, other)]
    else:
        name = "activations in flight"
    peak, base = peaks
    span = one.span / other.span - 1 if other.span else 0.0
    return (
        f"Compared with {other.program.name}: span {span:+.1%}, {name} of the fullest rank "
        f"{peak / base - 1 if base else 0.0:+.1%}."
    )


def _find_source_type(request: Request) -> str:
    """Return the type of the source, which decides which options the page shows.

    The result is "schedule", "draft", "lowered" or "run".
    """
    if request.source_timeline is not None:
        return "run"
    loaded = request.source.schedule_or_program
    if not isinstance(loaded, Program):
        return "schedule"
    return "draft" if loaded.is_draft else "lowered"


def describe_error(error: SchedirError, request: Request | None = None) -> dict[str, Any]:
    """Return an error as JSON. If the error names instructions, add a picture of these.

    Args:
        error: The error.
        request: The request that raised the error, or None.
    """
    return {
        "kind": type(error).__name__,
        "fact": error.fact,
        "message": str(error),
        # The page replaces options of the command line by the labels of its controls.
        "hint": error.hint.command if isinstance(error.hint, CommandHint) else error.hint,
        "fields": list(error.fields),
        "line": error.line if isinstance(error, CodeError) else 0,
        "sites": [
            {"rank": site.rank, "index": site.index, "text": str(site.instr), "note": site.note}
            for site in error.sites
        ],
        # The other schedule of a comparison has no picture.
        "picture": (
            _draw_error(error, request)
            if request and error.sites and "other" not in error.fields
            else ""
        ),
    }


def _draw_error(error: SchedirError, request: Request) -> str:
    """Return an SVG picture of the instructions that an error names.

    The result is "" if the draft does not contain these instructions.
    """
    with suppress(SchedirError):
        draft = find_draft(request)
        if all(
            site.rank < draft.shape.ranks
            and site.index < len(draft.streams[site.rank])
            and str(draft.streams[site.rank][site.index]) == str(site.instr)
            for site in error.sites
        ):
            return draw_deadlock(draft, error)
    return ""


def explain_gap(request: Request, state: StudioState, rank: int, index: int) -> dict[str, Any]:
    """Return the costs that affect a gap of a rank, and changes that shorten the step.

    A gap is an idle time between two instructions.

    Args:
        request: The request of a predicted run.
        state: The input of the studio, from which the request was made.
        rank: The rank.
        index: The index of the first instruction after the gap in the rank's stream.

    Returns:
        `gap_costs`: the costs that shorten the gap if they are 10 % lower, each with the new length
            of the gap.
        `changes`: changes that shorten the step, as the command `explain` prints them. Each change
            has a state from `find_changed_state`.
    """
    timeline, costs = request.timeline, request.prediction_costs
    if not 0 <= rank < timeline.ranks or not 0 <= index < len(timeline.program.streams[rank]):
        raise UsageError(f"rank {rank} has no instruction #{index}")
    advice = advise(timeline, costs, request.schedule, request.memory_limit)
    return {
        "gap_costs": [] if costs is None else _find_gap_costs(request, rank, index),
        "changes": [
            {
                "description": change.description,
                "saved_share": change.saved_share,
                "effect": change.describe(),
                "state": find_changed_state(state, request.shape, change),
            }
            for change in advice.changes[:_MAX_CHANGES]
            if change.saved_share >= MIN_SAVING
        ],
    }


def find_changed_state(
    state: StudioState, shape: PipelineShape, change: SimulatedChange
) -> dict[str, Any] | None:
    """Return the studio's state after a change to another built-in schedule, as JSON.

    Args:
        state: The state before the change.
        shape: The shape of the program of this state.
        change: The change.

    Returns:
        The state after the change. None if the change does not lead to a built-in schedule, or if
        the span of the new state differs from the span of the simulated change.
    """
    draft = change.row.draft
    if state.run or draft is None or draft.name not in get_built_in_schedules():
        return None
    options = scale_stage_values(state.options, shape.stages / draft.shape.stages)
    options.pop("placement", None)
    for name in ("ranks", "microbatches", "stages_per_rank"):
        options[name] = str(getattr(draft.shape, name))
    changed = replace(state, schedule=draft.name, program="", code="", options=options)
    with suppress(SchedirError):
        source = load_built_in(changed.schedule, "schedule")
        if isclose(make_state_request(changed, source).timeline.span, change.run.span):
            return changed.to_json()
    return None


def _find_gap_costs(request: Request, rank: int, index: int) -> list[dict[str, Any]]:
    """Return the costs whose reduction shortens a gap.

    The cost whose reduction leaves the shortest gap comes first. Only costs of instructions on the
    critical path to the end of the gap are tried.
    """
    timeline, costs = request.timeline, request.program_costs
    program, spans = timeline.program, timeline.spans
    position = int(program.offsets[rank]) + index
    old_gap = measure_gap(timeline, rank, position)
    chain = timeline.critical_path_to(position)
    links = {(int(spans["op"][k]), int(spans["stage"][k])) for k in chain.tolist()}
    gap_costs = []
    for op, stage in sorted(links):
        name = COST_BY_OPCODE.get(Opcode(op), "")
        value: Cost | None = getattr(costs, name, None)
        if value is None or not np.any(value):
            continue
        grid: NDArray[np.float64] = to_grid(value)
        if len(grid) == 1:
            grid = np.repeat(grid, program.shape.stages, 0)
        rows = stage if len(grid) == program.shape.stages else slice(None)
        grid = np.array(grid)
        grid[rows] *= _REDUCED_COST_FACTOR
        cheaper = from_grid(grid)
        with suppress(SchedirError):
            run = simulate(
                program,
                replace(costs, **{name: cheaper}),
                progress_model=timeline.progress_model,
            )
            new_gap = measure_gap(run, rank, position)
            if new_gap < old_gap - 1e-9 * timeline.span:
                text = f"{name} of stage {stage}"
                gap_costs.append(
                    {"cost": text, "old_gap": old_gap, "new_gap": new_gap, "span": run.span}
                )
    return sorted(gap_costs, key=lambda gap_cost: gap_cost["new_gap"])


def measure_gap(timeline: Timeline, rank: int, position: int) -> float:
    """Return the time between an instruction and the compute before it on its rank.

    Args:
        timeline: The run.
        rank: The rank.
        position: The position of the instruction in the program.
    """
    spans = timeline.spans
    earlier = np.arange(int(timeline.program.offsets[rank]), position)
    earlier = earlier[np.isin(spans["op"][earlier], COMPUTE_OPS)]
    previous_end = spans["end"][earlier].max(initial=timeline.start_time)
    return max(float(spans["start"][position] - previous_end), 0.0)
