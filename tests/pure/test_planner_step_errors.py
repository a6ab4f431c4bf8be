"""Tests of the intervals of predicted steps, and of the time to load training data."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import planner_errors
from schedir import Cluster, planner
from schedir.planner import ParallelPlan, PlanEstimate, StepErrors, TransformerSpec
from schedir.planner.calibration import CONSTANTS
from schedir.planner.hardware.cluster_size import resize_cluster
from schedir.planner.hardware.step_time_errors import MEASURED_ERRORS
from schedir.planner.plan_simplicity import measure_complexity
from tests.cases import cases
from tests.commands import run_command, run_refused_command

MODEL = TransformerSpec(16, 2048, 32, vocab=131072, sequence=4096, ffn=8192, gated=True)
NODE = planner.cluster_preset("h100-efa")
PLANS = (
    ParallelPlan(dp=8, microbatches=4, zero=1),
    ParallelPlan(pp=2, tp=2, dp=2, microbatches=8, microbatch_size=2, sequence_parallel=True),
    ParallelPlan(pp=4, tp=2, microbatches=8, stages_per_rank=2, schedule="interleaved"),
)
# These names need no fit, or a fit that takes seconds.
FAST = [name for name in MEASURED_ERRORS if "nanotron" not in name]


def estimate(plan: ParallelPlan, cluster: Cluster, closed_form_only: bool = True) -> PlanEstimate:
    return planner.estimate_step(MODEL, cluster, plan, closed_form_only=closed_form_only)


# ---------------------------------------------------------------- intervals


@pytest.mark.parametrize("name", cases(FAST, ["nanotron on h100-efa"]))
def test_errors_are_those_of_the_benchmark(name: str) -> None:
    """The errors in `MEASURED_ERRORS` are those of the command that its module names."""
    runs = planner_errors.COMPARISONS[name]()
    errors = MEASURED_ERRORS[name].errors
    assert planner_errors.measure_step_errors(runs) == pytest.approx(errors[:3], abs=6e-4)
    assert errors.source.startswith(f"{len(runs)} ")


def test_benchmark_measures_all_errors() -> None:
    assert planner_errors.COMPARISONS.keys() == MEASURED_ERRORS.keys()


@given(
    st.sampled_from(planner.cluster_presets()),
    st.sampled_from(["", *planner.stack_presets()]),
    st.just(0.0) | st.floats(1e-3, 0.5),
    st.floats(1e-6, 1e3),
)
def test_interval_contains_step(name: str, stack: str, uncertainty: float, seconds: float) -> None:
    cluster = replace(planner.cluster_preset(name), uncertainty=uncertainty)
    errors = planner.find_step_errors(cluster, stack)
    low, high = errors.find_interval(seconds)
    assert 0 < low < seconds < high and errors.resolution > 0
    if uncertainty:  # The logarithm of a calibrated step has a normal distribution.
        assert low * high == pytest.approx(seconds**2)
        assert errors == planner.find_step_errors(cluster)


def test_intervals_are_narrower_for_known_software_and_machine() -> None:
    a100, h100 = map(planner.cluster_preset, ("a100", "h100"))
    known, other_machine, unknown = (
        planner.find_step_errors(cluster, stack)
        for cluster, stack in ((a100, "megatron"), (h100, "megatron"), (a100, ""))
    )
    widths = [errors.high - errors.low for errors in (known, other_machine, unknown)]
    assert widths == sorted(widths)
    assert planner.find_step_errors(a100, "torchtitan") == unknown
    assert planner.find_step_errors(NODE, "nanotron").high < known.high


# Calibrated clusters and CPUs have other intervals.
OTHER_KINDS = ("uncertainty", "calibrated_gpus", "processors")


@pytest.mark.parametrize("name", [f.name for f in fields(Cluster) if f.name not in OTHER_KINDS])
def test_only_speeds_of_a_preset_have_its_interval(name: str) -> None:
    """A cluster with another size has the interval of the preset. Another speed is unknown."""
    value = getattr(NODE, name)
    other_value = value + 1 if isinstance(value, int) else 0.9 * value if value else 1e16
    changed = replace(NODE, **{name: other_value})  # type: ignore[arg-type]
    sizes = {"nodes", "gpus_per_node", "memory", "host_memory", "data_loading_us"}
    known = planner.find_step_errors(NODE, "nanotron")
    assert (planner.find_step_errors(changed, "nanotron") == known) == (name in sizes)


def test_cpus_have_their_own_interval() -> None:
    cpus = replace(planner.cluster_preset("a100"), processors=8)
    assert planner.find_step_errors(cpus) == MEASURED_ERRORS["schedir train on CPUs"].errors


@given(
    st.lists(st.tuples(st.sampled_from(PLANS), st.floats(0.1, 10)), min_size=1, max_size=8),
    st.floats(0.01, 3),
)
def test_indistinct_plans_are_near_the_fastest_and_simplest_first(
    cases: list[tuple[ParallelPlan, float]], resolution: float
) -> None:
    base = {plan: estimate(plan, NODE) for plan in PLANS}
    plans = [replace(base[plan], step_time=seconds) for plan, seconds in cases]
    positions = StepErrors(-0.1, 0.1, resolution, "runs").find_indistinct_plans(plans)
    shortest = min(seconds for _, seconds in cases)
    near = {k for k, (_, seconds) in enumerate(cases) if seconds / shortest - 1 <= resolution}
    assert {*positions} == near and len(positions) == len(near)
    complexities = [measure_complexity(plans[k]) for k in positions]
    assert complexities == sorted(complexities)


def test_command_prints_interval(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["plan", "--layers=8", "--hidden=256", "--heads=8", "--vocab=256", "--sequence=128"]
    options += ["--cluster=a100", "--gpus=4", "--batch=32", "--top=3", "--closed-form-only"]
    unknown, known = (
        run_command(capsys, *options, *more) for more in ([], ["--stack", "megatron"])
    )
    for text, factors in ((unknown, "0.82 to 2.71"), (known, "0.86 to 1.26")):
        assert f"step: 90 % of runs take {factors} times the prediction, as for " in text
        assert (
            "--calibrate" in text
            and "\nbytes per parameter: 2 weight, " in text
            and "(90 % of runs: " in text
        )
    assert ", the simplest first, may be equally fast: " in unknown
    facts = json.loads(run_command(capsys, *options, "--json"))
    errors = planner.find_step_errors(planner.cluster_preset("a100"))
    assert StepErrors(**facts["step_errors"]) == errors
    for plan in facts["plans"]:
        assert plan["step_interval"] == [*errors.find_interval(plan["step_time"])]
    options = [*(word for word in options if word != "--gpus=4"), "--gpu-counts=2,4"]
    assert "step: 90 % of runs take 0.82 to 2.71" in run_command(capsys, *options)
    facts = json.loads(run_command(capsys, *options, "--json"))
    assert StepErrors(**facts["step_errors"]) == errors


@pytest.mark.parametrize("precision", ["fp8", "fp4"])
def test_command_explains_mfu_of_low_precision(
    precision: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["plan", "--layers=8", "--hidden=256", "--heads=8", "--vocab=256", "--sequence=128"]
    options += ["--gpus=4", "--batch=32", "--top=1", "--closed-form-only"]
    sentence = f"MFU: the share of the peak in 16 bits; products in {precision.upper()} are faster"
    for stack, is_low in ((f"megatron-{precision}", True), ("megatron", False)):
        text = run_command(capsys, *options, "--cluster=b200", f"--stack={stack}")
        assert (sentence in text) == is_low
    error = run_refused_command(capsys, *options, "--cluster=a100", f"--stack=megatron-{precision}")
    assert "--stack megatron plans training in 16 bits" in error


# ---------------------------------------------------------------- data loading


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.schedule)
@pytest.mark.parametrize("closed_form_only", [True, False])
@given(microseconds=st.floats(0.1, 1e5), jitter=st.sampled_from([0.0, 0.01, 0.1]))
def test_data_loading_adds_time_of_each_sequence(
    plan: ParallelPlan, microseconds: float, closed_form_only: bool, jitter: float
) -> None:
    """A replica waits for each of its sequences, and the replicas wait for the slowest."""
    cluster = replace(resize_cluster(NODE, plan.gpus), jitter=jitter)
    loading = replace(cluster, data_loading_us=microseconds)
    before, after = (estimate(plan, one, closed_form_only) for one in (cluster, loading))
    seconds = microseconds / 1e6 * plan.microbatches * plan.microbatch_size
    assert before.breakdown.data_loading == 0
    assert after.breakdown.data_loading == pytest.approx(seconds)
    assert sum(after.breakdown) == after.step_time
    slowdown = (
        before.step_time / estimate(plan, replace(cluster, jitter=0.0), closed_form_only).step_time
    )
    added = after.step_time - before.step_time
    assert added == pytest.approx(seconds * slowdown, rel=1e-6, abs=1e-9)
    assert after.memory == before.memory


def test_calibration_keeps_time_of_data_loading() -> None:
    assert "data_loading_us" not in CONSTANTS
    cluster = replace(NODE, data_loading_us=500.0)
    stack = planner.stack_preset("nanotron")
    run = planner.MeasuredRun(MODEL, PLANS[0], 2.0)
    assert planner.calibrate(cluster, stack, [run]).cluster.data_loading_us == 500.0


def test_presets_load_data_in_no_time() -> None:
    for name in planner.cluster_presets():
        assert planner.cluster_preset(name).data_loading_us == 0
