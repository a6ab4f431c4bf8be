"""Tests of plans with offload: their times and memory, the search for them, and errors."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from schedir import (
    Cluster,
    PipelineShape,
    Program,
    check,
    compile,
    from_text,
    planner,
    schedules,
    simulate,
)
from schedir.commands.common.schedule_options import parse_costs
from schedir.errors import MemoryLimitError, UsageError
from schedir.ir.cost.sizes import add_tolerance
from schedir.ir.isa.instructions import Opcode
from schedir.planner.estimate.instruction_costs import compute_costs, compute_stage_times
from schedir.planner.hardware.software_constants import SoftwareConstants
from schedir.planner.plan_columns import simulation_only_error
from schedir.planner.plan_compilation import plan_program
from schedir.planner.transformer.stage_sizes import compute_sizes
from schedir.predict.layer_activation_bytes import Recompute
from tests.commands import run_command, run_refused_command

MODEL = planner.TransformerSpec(layers=8, hidden=2048, heads=16, vocab=8192, sequence=1024)
SMALL_MODEL = replace(MODEL, layers=4)  # on two GPUs of SMALL_MEMORY, it needs offload
SMALL_MEMORY = 2.7e9
NODE = Cluster(nodes=1, gpus_per_node=4, flops=250e12, memory=8e9, hbm_bandwidth=1.7e12,
    nvlink_bandwidth=230e9,
               network_bandwidth=25e9, latency=5e-6, kernel_us=2, host_bandwidth=240e9,
               host_memory=60e9)  # fmt: skip
RELATIVE_ERROR = 1e-9


def resize_node(gpus: int, **changes: Any) -> Cluster:
    return replace(NODE, gpus_per_node=gpus, **changes)


@st.composite
def offload_plans(draw: st.DrawFn) -> tuple[planner.ParallelPlan, Cluster]:
    """Draw a plan with offload, and GPUs with less memory than it needs without offload."""
    schedule = draw(st.sampled_from(["one_f_one_b", "gpipe", "interleaved", "zb_h1"]))
    p, t, d = (
        draw(st.sampled_from([1, 2, 4])),
        draw(st.sampled_from([1, 2])),
        draw(st.integers(1, 2)),
    )
    v = 2 if schedule == "interleaved" else 1
    choice = planner.ParallelPlan(
        pp=p, tp=t, dp=d, stages_per_rank=v, microbatch_size=draw(st.sampled_from([1, 4])),
        microbatches=p * draw(st.integers(1, 3)),
        schedule=schedule, zero=draw(st.integers(0, 3 if d > 1 else 0)),
        recompute=draw(st.sampled_from(get_args(Recompute))),
        sequence_parallel=t > 1 and draw(st.booleans()),
        optimizer_placement=draw(st.sampled_from(["device", "host"])),
        offload=draw(st.sampled_from(["none", "fit"])),
    )  # fmt: skip
    assume(choice.has_offload)
    plain = planner.simulate_plan(MODEL, resize_node(p * t * d), remove_offload(choice)).memory
    share = draw(st.floats(0.5, 1.0))
    return choice, resize_node(p * t * d, memory=max(share * plain.total, 1.1e9))


def remove_offload(choice: planner.ParallelPlan) -> planner.ParallelPlan:
    return replace(choice, offload="none", optimizer_placement="device")


@settings(max_examples=15, deadline=None)
@given(offload_plans())
def test_offload_breakdown_and_memory_match_program(
    case: tuple[planner.ParallelPlan, Cluster],
) -> None:
    """The breakdown sums to the step time, memory matches the program, and copies take time."""
    choice, node = case
    plain = planner.simulate_plan(MODEL, node, remove_offload(choice))
    try:
        estimate = planner.simulate_plan(MODEL, node, choice)
    except MemoryLimitError:
        assert choice.offload == "fit" and not plain.fits
        return
    assert sum(estimate.breakdown) == pytest.approx(estimate.step_time, rel=RELATIVE_ERROR)
    assert min(estimate.breakdown) >= 0
    assert (estimate.host_memory.optimizer > 0) == (choice.optimizer_placement == "host")
    if choice.offload == "fit":
        assert estimate.memory.total <= add_tolerance(node.memory)
    # The same program, made, checked and simulated by hand.
    program = check(planner.simulated_program(MODEL, node, choice))
    constants = SoftwareConstants()
    times = compute_stage_times(MODEL, node, choice)
    costs = compute_costs(MODEL, node, choice, program.shape, times, constants)
    held = compute_sizes(MODEL, choice, program.shape, constants)
    run = simulate(program, costs, progress_model="per_edge", sizes=held)
    assert run.span == pytest.approx(estimate.step_time, rel=RELATIVE_ERROR)
    # Costs also determine the order of messages, so the program to compare with is lowered with
    # the same costs.
    lowered: dict[str, Any] = {} if choice.offload == "none" else {"costs": costs}
    without_offload = simulate(
        plan_program(remove_offload(choice), **lowered), costs, progress_model="per_edge"
    )
    assert estimate.step_time >= without_offload.span * (1 - RELATIVE_ERROR)
    peak_bytes = run.peak_memory.max() * (1 + constants.allocator_share) + constants.reserved_bytes
    assert peak_bytes == pytest.approx(estimate.memory.total, rel=RELATIVE_ERROR)
    host_bytes = max(curve.total.max() for curve in run.memory_on("host"))
    assert host_bytes == pytest.approx(estimate.host_memory.total, rel=RELATIVE_ERROR)
    # No rank copies faster than the link. The bytes that each rank stores, and those that it
    # loads, fit into the time of the step.
    for stream in program.streams:
        for op, name in ((Opcode.Offload, "saved"), (Opcode.ReloadState, "optimizer")):
            size = held.for_stages(name, program.shape.stages)[stream.stage[stream.op == op]].sum()
            shards = choice.dp if op == Opcode.ReloadState and choice.zero else 1
            assert NODE.host_bandwidth is not None
            assert size / shards / NODE.host_bandwidth <= estimate.step_time


def test_single_stage_optimizer_copies_are_exposed() -> None:
    """With one stage, nothing runs during the load and the store of its optimizer states.

    The expected time is computed by hand.
    """
    choice = planner.ParallelPlan(microbatches=4, optimizer_placement="host")
    node = resize_node(1, memory=80e9)
    plain, estimate = (
        planner.simulate_plan(MODEL, node, plan) for plan in (remove_offload(choice), choice)
    )
    assert NODE.host_bandwidth is not None
    copy_time = NODE.latency + plain.memory.optimizer / NODE.host_bandwidth
    assert estimate.breakdown.host_copies == pytest.approx(2 * copy_time, rel=RELATIVE_ERROR)
    assert estimate.step_time == pytest.approx(plain.step_time + 2 * copy_time, rel=RELATIVE_ERROR)
    assert estimate.host_memory == planner.HostMemory(optimizer=plain.memory.optimizer)


@pytest.mark.parametrize("recompute", get_args(Recompute))
def test_offload_cost_is_saved_bytes_over_bandwidth(recompute: Recompute) -> None:
    """Each copy moves the bytes that a stage saved, and a slower link makes the step longer."""
    tight = planner.ParallelPlan(
        pp=4, microbatches=8, microbatch_size=4, recompute=recompute, offload="fit"
    )
    needed_bytes = planner.simulate_plan(
        MODEL, resize_node(4, memory=80e9), remove_offload(tight)
    ).memory.total
    node = resize_node(4, memory=0.9 * needed_bytes)
    program = plan_program(remove_offload(tight))
    costs = compute_costs(
        MODEL,
        node,
        tight,
        program.shape,
        compute_stage_times(MODEL, node, tight),
        SoftwareConstants(),
    )
    saved = compute_sizes(MODEL, tight, program.shape).for_stages("saved", tight.stages)
    assert NODE.host_bandwidth is not None and costs.offload == costs.reload
    for stage in range(tight.stages):
        offload_cost = costs.for_opcode(Opcode.Offload, program.shape)[stage]
        assert offload_cost == pytest.approx(
            NODE.latency + saved[stage] / NODE.host_bandwidth, rel=RELATIVE_ERROR
        )
    if recompute == "none":
        estimate, offload_program = (
            planner.simulate_plan(MODEL, node, tight),
            planner.simulated_program(MODEL, node, tight),
        )
        slow_link, times = (
            replace(node, host_bandwidth=1e9),
            compute_stage_times(MODEL, node, tight),
        )
        slow = compute_costs(MODEL, slow_link, tight, program.shape, times, SoftwareConstants())
        assert estimate.fits and estimate.host_memory.activations > 0
        assert (
            simulate(offload_program, slow, progress_model="per_edge").span > 2 * estimate.step_time
        )


def test_plan_that_needs_offload_is_found() -> None:
    """No plan fits without offload.

    With offload, no plan with optimizer states on the host has a shorter step than the first.
    """
    node, options = (
        resize_node(2, memory=SMALL_MEMORY),
        {"pp": 1, "schedules": ("one_f_one_b", "interleaved")},
    )
    with pytest.raises(UsageError, match="plans fits into"):
        planner.plan(SMALL_MODEL, node, 2, **options)  # type: ignore[arg-type]
    best, *_ = plans_found = planner.plan(SMALL_MODEL, node, 2, top=3, offload=True, **options)  # type: ignore[arg-type]
    assert all(plan.fits and plan.is_simulated and plan.has_offload for plan in plans_found)
    assert [plan.step_time for plan in plans_found] == sorted(
        plan.step_time for plan in plans_found
    )
    assert best.offload_comparison.startswith("no plan fits without offload: the smallest needs ")
    shortest = min(list_host_optimizer_step_times(node, 2, options))
    assert best.step_time <= shortest


def list_host_optimizer_step_times(
    node: Cluster, batch: int, options: dict[str, Any]
) -> list[float]:
    """Return the step times of all plans that fit with only the optimizer states on the host."""
    plans = planner.all_plans(SMALL_MODEL, node, batch, offload=True, **options).plans
    steps = []
    for index in range(len(plans)):
        estimate = planner.simulate_plan(
            SMALL_MODEL,
            node,
            replace(plans.plan_at(SMALL_MODEL, index), optimizer_placement="host"),
        )
        steps += [estimate.step_time] * estimate.fits
    return steps


def test_fitting_plans_are_compared_with_offload() -> None:
    """Plans without offload are unchanged, and the first is compared with the best with offload."""
    node = resize_node(2, memory=80e9)
    plain, with_offload = (
        planner.plan(
            SMALL_MODEL, node, 4, top=3, schedules=("one_f_one_b", "zb_h1"), offload=uses_offload
        )
        for uses_offload in (False, True)
    )
    assert [replace(plan, offload_comparison="") for plan in with_offload] == plain
    assert with_offload[0].offload_comparison == "no plan with offload is among the best plans"


REFUSED: dict[str, dict[str, Any]] = {
    "host_bandwidth and host_memory": {"host_bandwidth": None, "host_memory": None},
    "a value for host_memory of the cluster, which is not set": {"host_memory": None},
    "processors of this cluster compute in host memory": {"processors": 4},
}


@pytest.mark.parametrize("fact", REFUSED)
def test_offload_needs_host_values_of_cluster(fact: str) -> None:
    node = resize_node(4, **REFUSED[fact])
    with pytest.raises(UsageError, match=fact):
        planner.plan(MODEL, node, 8, offload=True)
    for option in ({"offload": "fit"}, {"optimizer_placement": "host"}):
        with pytest.raises(UsageError, match=fact):
            planner.simulate_plan(MODEL, node, planner.ParallelPlan(pp=4, microbatches=8, **option))  # type: ignore[arg-type]


def test_functions_without_copy_support_refuse_offload(tmp_path: Path) -> None:
    offload_plan, node = planner.ParallelPlan(pp=4, microbatches=8, offload="fit"), resize_node(4)
    closed = simulation_only_error().fact
    with pytest.raises(UsageError, match=closed):
        planner.plan(MODEL, node, 8, offload=True, closed_form_only=True)
    with pytest.raises(UsageError, match=closed):
        planner.estimate_step(MODEL, node, offload_plan, closed_form_only=True)
    with pytest.raises(UsageError, match=closed):
        planner.peak_memory(MODEL, node, offload_plan)
    for knows_nothing in (planner.optimize_layer_division, planner.improve_schedule):
        with pytest.raises(UsageError, match="does not support plans with offload"):
            knows_nothing(MODEL, node, offload_plan)
    with pytest.raises(UsageError, match="offload 'fit' needs an offload_program"):
        planner.train_config(MODEL, offload_plan)
    with pytest.raises(UsageError, match="needs sizes and memory_limit"):
        plan_program(offload_plan)
    tight, small_node = make_tight_plan(node)
    moves = planner.simulated_program(MODEL, small_node, tight)
    config = tomllib.loads(planner.train_config(MODEL, tight, offload_program=moves))["memory"][
        "offload"
    ]
    compiled = compile(schedules.one_f_one_b, PipelineShape(4, 8), offload=config)
    assert list_offloaded(compiled) == list_offloaded(moves) != set()
    config = tomllib.loads(
        planner.train_config(
            MODEL, replace(offload_plan, offload="none", optimizer_placement="host")
        )
    )
    assert config["memory"] == {"optimizer_placement": "host"}
    program_path = tmp_path / "own.sched"
    program_path.write_text(make_offload_text(node), encoding="utf-8")
    file = replace(offload_plan, schedule=str(program_path), offload="none")
    with pytest.raises(
        UsageError, match="contains offload, and the planner cannot estimate the copies"
    ):
        planner.simulate_plan(MODEL, node, file)
    with pytest.raises(
        UsageError, match="is a lowered program, and a plan cannot change its offload"
    ):
        plan_program(replace(file, optimizer_placement="host"))
    with pytest.raises(UsageError, match="'host' with expert parallelism, and ep is 2"):
        experts = replace(MODEL, experts=4, active=2)
        planner.simulate_plan(
            experts,
            node,
            planner.ParallelPlan(dp=4, ep=2, microbatches=8, zero=1, optimizer_placement="host"),
        )


def list_offloaded(program: Program) -> set[tuple[int, int]]:
    return {(s, mb) for stream in program.streams for op, s, mb in stream if op == Opcode.Offload}


def make_tight_plan(node: Cluster) -> tuple[planner.ParallelPlan, Cluster]:
    """Return a plan that offloads some of its microbatches, and the cluster where it does."""
    tight = planner.ParallelPlan(pp=4, microbatches=8, microbatch_size=4, offload="fit")
    needed_bytes = planner.simulate_plan(
        MODEL, replace(node, memory=80e9), remove_offload(tight)
    ).memory.total
    return tight, replace(node, memory=0.9 * needed_bytes)


def make_offload_text(node: Cluster) -> str:
    from schedir import to_text

    tight, small_node = make_tight_plan(node)
    program = planner.simulated_program(MODEL, small_node, tight)
    assert Opcode.Offload in program.used_opcodes
    return to_text(program)


MODEL_OPTIONS = ("--layers=4", "--hidden=2048", "--heads=16", "--vocab=8192", "--sequence=1024")


def test_plan_command_with_offload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The output names the data on the host and the gain. The file has the program of the plan."""
    node, out = tmp_path / "node.toml", tmp_path / "best.sched"
    numbers = vars(resize_node(2, memory=SMALL_MEMORY))
    lines = [f"{name} = {value}" for name, value in numbers.items() if value]
    node.write_text("\n".join(lines), encoding="utf-8")
    command = ("plan", *MODEL_OPTIONS, f"--cluster={node}", "--batch=2", "--pp=1", "--top=2")
    text = " ".join(run_command(capsys, *command, "--offload", "-o", str(out)).split())
    for phrase in ("host copies", " of 60 GB", "optimizer state on the host",
                  "offload: no plan fits without offload", "bound by "):  # fmt: skip
        assert phrase in text, text
    program = check(from_text(out.read_text(encoding="utf-8")))
    assert Opcode.ReloadState in program.used_opcodes
    (costs_line,) = [
        line for line in out.read_text(encoding="utf-8").splitlines() if "--costs" in line
    ]
    costs = costs_line.partition("--costs ")[2]
    step = simulate(program, parse_costs(costs), progress_model="per_edge").span
    # The best plan does not depend on the number of plans that are asked for.
    small_node = resize_node(2, memory=SMALL_MEMORY)
    best, *_ = planner.plan(SMALL_MODEL, small_node, 2, pp=1, top=1, offload=True)
    assert step == pytest.approx(best.step_time, rel=1e-3)
    for option in ("--tradeoff", "--optimize-division", "--improve-schedules"):
        picture_options = ("--picture", str(tmp_path / "x.svg")) if option == "--tradeoff" else ()
        assert f"{option} cannot be combined with --offload" in run_refused_command(
            capsys, *command, "--offload", option, *picture_options
        )
    assert "closed forms cannot estimate plans with offload" in run_refused_command(
        capsys, *command, "--offload", "--closed-form-only"
    )
    bare = [line for line in lines if not line.startswith("host")]
    node.write_text("\n".join(bare), encoding="utf-8")
    assert (
        "needs a value for host_bandwidth and host_memory of the cluster, which is not set"
        in run_refused_command(capsys, *command, "--offload")
    )


def test_windowed_attention_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.toml"
    shape = "layers = 2\nhidden = 64\nheads = 4\nvocab = 64\ncontext = 32\n"
    file.write_text(f"[model]\n{shape}window = 0\nstride = 1\n", encoding="utf-8")
    assert planner.load_model(file).sequence == 32
    for window in ("8", "[0, 8]"):
        file.write_text(f"[model]\n{shape}window = {window}\n", encoding="utf-8")
        with pytest.raises(UsageError, match="the planner does not support attention with window"):
            planner.load_model(file)
