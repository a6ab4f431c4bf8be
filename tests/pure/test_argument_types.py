"""Tests that a function refuses an argument of a wrong type with a schedir error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
import pytest

from schedir import (
    Costs,
    F,
    PipelineShape,
    Sizes,
    TiedWeights,
    check,
    compile,
    expand_schedule,
    find_tied_weights,
    save_timeline,
    simulate,
    to_text,
    torch_csv,
)
from schedir.errors import SchedirError
from schedir.io import perfetto
from schedir.ir.program import SlotCounts
from schedir.ir.text_format import from_text
from schedir.predict.bubble_causes import idleness
from schedir.predict.calibrate import calibrate
from schedir.predict.what_if import advise
from schedir.schedules import one_f_one_b
from schedir.schedules.greedy import greedy_schedule
from schedir.schedules.schedule_algebra import B, concat, overlapped_pair, weave
from schedir.viz import gantt, save, save_html
from schedir.viz.figures import gantt_chart

SHAPE = PipelineShape(2, 4)
PROGRAM = compile(one_f_one_b, SHAPE)
RUN = simulate(PROGRAM)
VALUES: list[Any] = [
    None,
    3,
    {},
    [1],
    np.arange(3),
    PipelineShape,
    SHAPE,
    one_f_one_b,
    PROGRAM,
    Costs(),
    Costs,
    F,
    "x",
]
ACCEPTED_TYPES: dict[str, tuple[Callable[[Any], object], tuple[type, ...]]] = {
    "compile": (lambda v: compile(one_f_one_b, v), (PipelineShape,)),
    "compile for": (lambda v: compile(one_f_one_b, SHAPE, progress_model=v), ()),
    "check": (check, ()),
    "check under": (lambda v: check(PROGRAM, v), ()),
    "simulate": (lambda v: simulate(v), ()),
    "simulate under": (lambda v: simulate(PROGRAM, progress_model=v), ()),
    "draft": (lambda v: expand_schedule(one_f_one_b, v), (PipelineShape,)),
    "show": (to_text, ()),
    "parse": (from_text, ()),
    "torch_csv.parse": (torch_csv.from_csv, ()),
    "compile at": (lambda v: compile(one_f_one_b, SHAPE, costs=v), (Costs, NoneType)),
    "compile of": (lambda v: compile(one_f_one_b, SHAPE, sizes=v), (Sizes, NoneType)),
    "compile, clipping": (lambda v: compile(one_f_one_b, SHAPE, clip_grad_norm=v), (NoneType,)),
    "compile, overlapping": (lambda v: compile(one_f_one_b, SHAPE, overlap=v), ()),
    "compile with tp": (lambda v: compile(one_f_one_b, SHAPE, tp=v), (int, NoneType)),
    "slots": (lambda v: replace(PROGRAM, slots=v), (dict,)),
    "slots of a rank": (lambda v: replace(PROGRAM, slots=(v, v)), ()),
    "a number of slots": (lambda v: replace(PROGRAM, slots=(SlotCounts(1, 1, 1, v),) * 2), (int,)),
    "check on hosts": (lambda v: check(PROGRAM, blocking_hosts=v), ()),
    "simulate on hosts": (lambda v: simulate(PROGRAM, blocking_hosts=v), ()),
    "simulate, unchecked": (lambda v: simulate(PROGRAM, skip_checks=v), ()),
    "simulate at": (lambda v: simulate(PROGRAM, v), (Costs, NoneType)),
    "simulate of": (lambda v: simulate(PROGRAM, sizes=v), (Sizes, NoneType)),
    "greedy": (lambda v: greedy_schedule(v, "BF", 4), (PipelineShape,)),
    "greedy, preferring": (lambda v: greedy_schedule(SHAPE, v, 4), ()),
    "greedy, holding": (lambda v: greedy_schedule(SHAPE, "BF", lambda rank: v), (int,)),
    "greedy at": (lambda v: greedy_schedule(SHAPE, "BF", 4, v), (Costs, NoneType)),
    "ties": (find_tied_weights, (dict,)),
    "Ties": (TiedWeights, (dict,)),
    "calibrate": (calibrate, ()),
    "idleness": (idleness, ()),
    "advise": (advise, ()),
    "perfetto": (perfetto.to_json, ()),
    "rows": (lambda v: torch_csv.from_csv(torch_csv.to_csv(PROGRAM), ranks=v), (NoneType,)),
    "a chart": (gantt, ()),
    "a title": (lambda v: gantt(RUN, title=v), (str, NoneType)),
    "titles": (lambda v: gantt_chart.compare([RUN, RUN], titles=v), (NoneType,)),
    "a width": (lambda v: gantt(RUN, width=v), (int, NoneType)),
    "marks": (lambda v: gantt(RUN, show=v), (dict,)),
    "a palette": (lambda v: gantt(RUN, palette=v), ()),
    "colors": (lambda v: gantt(RUN, colors=v), (dict,)),
    "an axis": (lambda v: gantt(RUN, axis_label=v), (str, NoneType)),
    "a part": (lambda v: gantt(RUN, time_range=v), (NoneType,)),
    "a figure": (lambda v: save(v, "x.png"), ()),
    "a picture's file": (lambda v: save(gantt(RUN), v), ()),
    "a page's file": (lambda v: save_html(v, RUN), (str,)),
    "a run's file": (lambda v: save_timeline(RUN, v), (str,)),
}


@pytest.mark.parametrize("name", ACCEPTED_TYPES)
def test_argument_of_wrong_type_raises_schedir_error(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    call, accepted = ACCEPTED_TYPES[name]
    for value in VALUES:
        is_accepted_program = name in ("check", "simulate", "show") and value is PROGRAM
        if isinstance(value, accepted) or is_accepted_program:
            call(value)
            continue
        with pytest.raises(SchedirError) as error:
            call(value)
        assert " at 0x" not in str(error.value), value


@pytest.mark.parametrize("value", [None, 3, [F], np.arange(3), SHAPE, "F"], ids=str)
def test_schedule_algebra_refuses_other_types(value: Any) -> None:
    calls: dict[str, Callable[[], object]] = {
        "second of overlapped_pair": lambda: overlapped_pair(F, value),
        "first of overlapped_pair": lambda: overlapped_pair(value, F),
        "forwards of weave": lambda: weave(value, 4 * B, 1),
        "backwards of weave": lambda: weave(4 * F, value, 1),
        "weights of weave": lambda: weave(4 * F, 4 * B, 1, value),
        "element 1 of concat": lambda: concat([F, value]),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError, match=rf"{name} must be a rank schedule such as 3 \* F or"):
            call()
    if not isinstance(value, int):
        with pytest.raises(TypeError, match="warmup of weave takes an integer, not"):
            weave(4 * F, 4 * B, value)


def test_costs_accept_numpy_scalars_and_arrays() -> None:
    forwards: list[Any] = [np.array(2.0), np.float32(2), np.array([2.0, 1.0])]
    assert [Costs(F=value).F for value in forwards] == [2.0, 2.0, (2.0, 1.0)]
