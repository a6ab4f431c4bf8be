"""Tests that retired options, keys, arguments and attributes are refused with their new name."""

import importlib
from collections.abc import Callable
from copy import deepcopy
from types import ModuleType
from typing import Any

import pytest

import schedir
from schedir import Costs, PipelineShape, Sizes, planner
from schedir.call_errors import explain_wrong_calls
from schedir.errors import ParseError, SchedirError, UsageError
from schedir.retired_names import OTHER_ATTRIBUTES, RETIRED_HINTS

shape = PipelineShape(2, 4)
program: Any = schedir.compile(schedir.schedules.gpipe, shape)
timeline: Any = schedir.simulate(program)


def get_retired_hint(error: SchedirError) -> str:
    assert error.hint in RETIRED_HINTS.values()
    return error.hint


def test_retired_compile_option_has_hint() -> None:
    with pytest.raises(UsageError) as caught:
        schedir.compile(schedir.schedules.gpipe, PipelineShape(2, 2), open=True)  # type: ignore[call-arg]
    assert "more microbatches" in get_retired_hint(caught.value)


def test_retired_program_key_has_hint() -> None:
    text = schedir.to_text(schedir.compile(schedir.schedules.gpipe, PipelineShape(2, 2)))
    with pytest.raises(ParseError) as caught:
        schedir.from_text(text.replace("ranks 2", "ranks 2  open yes"))
    assert "more microbatches" in get_retired_hint(caught.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        # Positional arguments that are hard to read.
        (lambda any_: any_(Costs)(1, 2), "Costs(F=1, B=2)"),
        (lambda any_: any_(Sizes)(1e6), "Sizes(activation="),
        (lambda any_: any_(PipelineShape)(2, 4, 1, "loop", 2), "ranks, microbatches"),
        (lambda any_: any_(schedir.Cluster)(2, 8, 1e12), "only nodes, gpus_per_node"),
        (lambda any_: any_(planner.ParallelPlan)(8, 8), "each needs its name"),
        (lambda any_: any_(schedir.compile)("gpipe", shape, 2), "only schedule, shape"),
        (lambda any_: any_(schedir.simulate)(program, None, "per_edge"), "only program, costs"),
        # Retired names.
        (lambda any_: any_(PipelineShape)(2, 4, updates=2), "it is now optimizer_steps"),
        (lambda any_: any_(Costs)(gather=1), "it is now tp_gather"),
        (lambda any_: any_(Sizes)(tape=1), "it is now deferred_wgrad"),
        (lambda any_: any_(schedir.check)(program, model="per_edge"), "it is now progress_model"),
        (lambda any_: any_(schedir.search_schedule)(shape, seconds=2), "it is now time_limit"),
        (lambda any_: any_(planner.ParallelPlan)(p=2), "it is now pp"),
        (lambda any_: any_(schedir.Cluster)(2, 8, nvlink=1), "it is now nvlink_bandwidth"),
        # Names of other libraries, and typing errors.
        (lambda any_: any_(PipelineShape)(num_ranks=2, microbatches=4), "did you mean 'ranks'?"),
        (lambda any_: any_(PipelineShape)(2, num_microbatches=4), "did you mean 'microbatches'?"),
        (lambda any_: any_(planner.ParallelPlan)(ranks=2), "did you mean 'pp'?"),
        (lambda any_: any_(schedir.compile)("gpipe", shape, num_stages=2), "'stages_per_rank'"),
        (lambda any_: any_(schedir.compile)("gpipe", shape, virtual_stages=2), "'stages_per_rank'"),
        (lambda any_: any_(schedir.compile)("gpipe", shape, tensor_parallel=2), "mean 'tp'?"),
        (lambda any_: any_(Costs)(comm=1), "did you mean 'send'?"),
        (lambda any_: any_(Costs)(forward=1), "did you mean 'F'?"),
        (lambda any_: any_(Costs)(sned=1), "did you mean 'send'?"),
        (lambda any_: any_(schedir.greedy_schedule)(ranks=2), "greedy_schedule(PipelineShape("),
        # Missing and double arguments.
        (lambda any_: any_(PipelineShape)(2), "PipelineShape needs microbatches"),
        (lambda any_: any_(PipelineShape)(2, 4, ranks=2), "got the argument ranks twice"),
    ],
)
def test_wrong_call_has_hint(call: Callable[[Any], object], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        call(lambda name: name)
    assert message in str(caught.value)


def test_type_error_inside_function_is_kept() -> None:
    @explain_wrong_calls("add(1)")
    def add(number: int) -> int:
        return number + "1"  # type: ignore[operator]

    with pytest.raises(TypeError, match="unsupported operand"):
        add(1)


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda: timeline.makespan, "use timeline.span"),
        (lambda: timeline.model, "did you mean progress_model?"),
        (lambda: timeline.spam, "did you mean span?"),
        (lambda: program.ranks, "use program.shape.ranks"),
        (lambda: program.updates, "no attribute 'updates'"),
        (lambda: vars(type(shape)) and shape.num_stages, "use shape.stages"),  # type: ignore[attr-defined]
        (lambda: schedir.dooble, "no attribute 'dooble'"),
        (lambda: schedir.simulat, "did you mean simulate?"),
    ],
)
def test_wrong_attribute_has_hint(read: Callable[[], object], message: str) -> None:
    with pytest.raises(AttributeError, match=message.replace("?", r"\?")):
        read()
    assert deepcopy(timeline).span == timeline.span  # A copy asks for attributes that do not exist.


@pytest.mark.parametrize("name", OTHER_ATTRIBUTES["schedir"])
def test_name_of_other_module_has_hint(name: str) -> None:
    with pytest.raises(ImportError) as caught:
        getattr(schedir, name)
    hint = OTHER_ATTRIBUTES["schedir"][name]
    assert str(caught.value).endswith(hint)
    module, _, attribute = hint.partition("(")[0].partition(",")[0].rpartition(".")
    if module.startswith("schedir") and attribute.isidentifier():
        assert hasattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize("module", [schedir, schedir.viz, schedir.testing, planner])
def test_dir_lists_public_names(module: ModuleType) -> None:
    assert {*module.__all__} <= {*dir(module)}


def test_call_of_schedule_with_options_only_is_refused() -> None:
    interleaved: Any = schedir.schedules.interleaved
    with pytest.raises(UsageError, match="interleaved needs r, P, m and v") as caught:
        interleaved(group=2)
    assert "functools.partial(schedules.interleaved, group=4)" in caught.value.hint
    with pytest.raises(UsageError, match=r"no argument 'groups'\n.*did you mean 'group'"):
        interleaved(groups=2)


def test_schedule_string_with_options_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        schedir.compile("interleaved(group=4)", shape)
    assert "functools.partial(schedir.schedules.interleaved, group=4)" in caught.value.hint


def test_schedule_without_shape_has_hint() -> None:
    for schedule in (schedir.schedules.zb_h1, "zb_h1"):
        with pytest.raises(UsageError, match="needs ranks and microbatches for this schedule"):
            schedir.simulate(schedule, Costs(F=1))


@pytest.mark.parametrize("kind", [schedir.Timeline, schedir.Program, PipelineShape])
def test_attributes_in_hints_exist(kind: type) -> None:
    objects = {"timeline": timeline, "program": program, "shape": shape, "schedir": schedir}
    for expression in OTHER_ATTRIBUTES[kind.__name__].values():
        path = expression.partition("(")[0].split(".")
        value = objects.get(path[0])
        for name in path[1:] if value is not None else ():
            value = getattr(value, name)
