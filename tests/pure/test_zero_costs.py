"""Tests of the costs of ZeRO: bytes sent by programs, seconds on clusters, and waits."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedir import (
    Cluster,
    Costs,
    PipelineShape,
    Program,
    Sizes,
    Timeline,
    compile,
    schedules,
    simulate,
)
from schedir.analysis.progress_models import MODELS, ProgressModel
from schedir.commands.simulate import count_sent_bytes
from schedir.errors import UsageError
from schedir.ir.isa.instructions import Lane, Opcode
from schedir.predict.bubble_causes import IdleCause, idleness, sum_by_cause
from schedir.predict.calibrate import calibrate
from schedir.predict.what_if import advise
from tests.commands import run_command

SIZES = Sizes(activation=60e6, params=2e9, grads=4e9, optimizer=12e9)
ZOO = {
    "one_f_one_b": PipelineShape(3, 6), "interleaved": PipelineShape(2, 4, 3),
    "looped_bfs": PipelineShape(2, 4, 3),
    "zb_h1": PipelineShape(3, 6), "chimera": PipelineShape(2, 4, placement="mirror"),
    "dualpipe": PipelineShape(2, 4, placement="mirror"),
}  # fmt: skip


@cache
def compile_zero(name: str, **attributes: object) -> Program:
    return compile(getattr(schedules, name), ZOO[name], **attributes)  # type: ignore[arg-type]


def cluster(nodes: int = 1, gpus_per_node: int = 4, latency: float = 0.0) -> Cluster:
    return Cluster(
        nodes,
        gpus_per_node,
        flops=300e12,
        memory=80e9,
        hbm_bandwidth=2e12,
        nvlink_bandwidth=300e9,
        network_bandwidth=20e9,
        latency=latency,
    )


@pytest.mark.parametrize("zero", [0, 1])
def test_rings_between_nodes_have_the_mean_latency(zero: int) -> None:
    """A ring of 8 ranks on 2 nodes has 2 links between nodes, and 6 links within them."""
    two_nodes = replace(cluster(nodes=2, latency=1e-6), network_latency=1e-3)
    shape = PipelineShape(1, 2)
    sizes = replace(SIZES, activation=0.0)
    costs = two_nodes.fill_costs(shape, sizes, Costs(F=1.0, B=2.0), dp=8, zero=zero)
    seconds = two_nodes.all_gather_time(4e9, 8)
    assert two_nodes.latency_of(8) == pytest.approx((2 * 1e-3 + 6 * 1e-6) / 8)
    found = costs.reduce_scatter if zero else costs.reduce_grads
    assert found == pytest.approx(seconds * (1 if zero else 2))


# ---------------------------------------------------------------- sent bytes


@pytest.mark.parametrize("dp", [2, 3, 64])
def test_sent_bytes_match_zero_paper(dp: int) -> None:
    """Volumes are 2 Psi, 2 Psi, 2 Psi and 3 Psi, of which 1/dp is not sent (1910.02054, section 7).

    One rank runs its stages forward one by one, and back. Each is unsharded twice except the last
    ones, which stay unsharded and have no weights here.
    """
    psi = 3 * 2e9
    stage_params = (2e9, 2e9, 2e9, 0, 0, 0)
    sizes = Sizes(params=stage_params, grads=stage_params)
    for zero, times in enumerate((2, 2, 2, 3)):
        program = compile(schedules.looped_bfs, PipelineShape(1, 4, 6), dp=dp, zero=zero)
        sent = sum(lane_bytes[0] for lane_bytes in count_sent_bytes(program, sizes).values())
        assert sent == pytest.approx(times * psi * (dp - 1) / dp)


@pytest.mark.parametrize("name", ZOO)
def test_sent_bytes_match_instructions(name: str) -> None:
    """The expected bytes are added up instruction by instruction."""
    for zero, reduce in (
        (0, "update_end"),
        (1, "update_end"),
        (2, "each_backward"),
        (3, "update_end"),
        (3, "each_backward"),
    ):
        program = compile_zero(name, dp=4, zero=zero, reduce_scatter_at=reduce, tp=2)
        sent_per_op = {"unshard": 2e9, "reduce_scatter": 4e9, "reduce_grads": 8e9}
        expected = np.zeros((len(Lane), program.shape.ranks))
        for rank, stream in enumerate(program.streams):
            for i in stream:
                if i.op.name in ("Unshard", "ReduceScatter", "ReduceGrads"):
                    lane = Lane.PARAMS if i.op is Opcode.Unshard else Lane.DP
                    expected[lane, rank] += sent_per_op[str(i).split()[0]] * 3 / 4
                # Two stage replicas exchange the shard that each has.
                if i.op is Opcode.ReduceReplicatedStages:
                    expected[Lane.DP, rank] += 4e9 / (4 if zero else 1)
                if i.op.name in ("SendAct", "SendGrad"):
                    expected[Lane.ACT if i.op.name == "SendAct" else Lane.GRAD, rank] += 30e6
                if i.op.name in ("TPGatherAct", "TPGatherGrad"):
                    expected[Lane.TP, rank] += 30e6
        sent_bytes = count_sent_bytes(program, SIZES)
        for lane in Lane:
            assert sent_bytes.get(lane, np.zeros(program.shape.ranks)) == pytest.approx(
                expected[lane]
            )


def test_reducing_after_each_backward_sends_more() -> None:
    end, each_backward = (
        count_sent_bytes(compile_zero("interleaved", dp=2, zero=3, reduce_scatter_at=r), SIZES)
        for r in ("update_end", "each_backward")
    )
    assert (each_backward[Lane.DP] > end[Lane.DP]).all()
    assert (each_backward[Lane.PARAMS] == end[Lane.PARAMS]).all()
    same = [
        count_sent_bytes(compile_zero("looped_bfs", dp=2, zero=3, reduce_scatter_at=r), SIZES)
        for r in ("update_end", "each_backward")
    ]
    assert (same[0][Lane.DP] == same[1][Lane.DP]).all()  # each stage has one run of backwards


def test_simulate_prints_sent_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["simulate", "looped_bfs", "--ranks=1", "--microbatches=4", "--stages-per-rank=4",
             "-O", "dp=2", "-O", "zero=3", "--sizes=params=2GB,grads=4GB"]  # fmt: skip
    assert "bytes that a process sends, at most: dp 8 GB, params 6 GB\n" in run_command(
        capsys, *shape
    )
    facts = json.loads(run_command(capsys, *shape, "--json"))
    assert facts["sent_bytes"] == {"dp": [8e9], "params": [6e9]}
    assert "sends" not in run_command(capsys, *shape[:-1])


# ---------------------------------------------------------------- seconds of a cluster


def test_unshard_and_reduce_scatter_cost_half_all_reduce() -> None:
    """Replicas share a node or have a node each, and the time is that of the link they cross."""
    for nodes, gpus_per_node, link in ((1, 8, 300e9), (2, 4, 20e9)):
        near_cluster, shape = cluster(nodes, gpus_per_node, 1e-5), PipelineShape(4, 8)
        plain = near_cluster.fill_costs(shape, SIZES, Costs(F=1, B=2), dp=2)
        assert plain.unshard is None and plain.reduce_scatter is None
        assert plain.reduce_grads == pytest.approx(2 * (1e-5 + 4e9 / 2 / link))
        for zero in (1, 2, 3):
            costs = near_cluster.fill_costs(shape, SIZES, Costs(F=1, B=2), dp=2, zero=zero)
            assert costs.unshard == pytest.approx(1e-5 + 2e9 / 2 / link)
            assert costs.reduce_scatter == pytest.approx(1e-5 + 4e9 / 2 / link)
            assert costs.reduce_grads is None  # it has no all-reduce
            assert costs.step == pytest.approx(float(plain.step) / 2)  # type: ignore[arg-type]


def test_costs_depend_on_weights_of_stage() -> None:
    sizes = replace(SIZES, params=(1e9, 2e9), grads=(0, 4e9))
    costs = cluster().fill_costs(PipelineShape(2, 4), sizes, Costs(F=1, B=2), dp=2, zero=3)
    assert costs.unshard == pytest.approx((0.5 / 300, 1 / 300))
    assert costs.reduce_scatter == pytest.approx((0, 2 / 300))


@pytest.mark.parametrize(
    ("name", "sizes"), [("unshard", {"params"}), ("reduce_scatter", {"grads"})]
)
def test_cluster_costs_need_sizes(name: str, sizes: set[str]) -> None:
    other_costs = dict.fromkeys({"unshard", "reduce_scatter", "send", "step"} - {name}, 0.0)
    with pytest.raises(UsageError) as caught:
        cluster().fill_costs(
            PipelineShape(2, 4), None, Costs(F=1, B=2, **other_costs), dp=2, zero=2
        )
    assert {*caught.value.fields} == sizes


def test_stage_replicas_sum_shards() -> None:
    shape = PipelineShape(2, 4, placement="mirror")
    for zero, shards in ((0, 1), (3, 2)):
        costs = cluster().fill_costs(shape, SIZES, Costs(F=1, B=2), dp=2, zero=zero)
        assert costs.reduce_replicated_stages == pytest.approx(4e9 / shards / 300e9)


def test_simulate_fills_zero_costs_from_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["simulate", "zb_h1", "--ranks=4", "--microbatches=4", "-O", "tp=2", "-O", "dp=2", "-O",
             "zero=3",
             "--sizes=activation=60MB,params=2GB,grads=4GB,optimizer=12GB",
             "--cluster=examples/selene.toml", "--costs=F=0.01,B=0.02", "--json"]  # fmt: skip
    filled = json.loads(run_command(capsys, *shape))["cluster_costs"]
    assert filled["unshard"] == pytest.approx(2 * filled["reduce_scatter"] / 4)
    assert "reduce_grads" not in filled


# ---------------------------------------------------------------- times

COST = st.sampled_from([0.0, 0.25, 1.0, 3.0])
CASES = st.tuples(st.sampled_from(sorted(ZOO)), st.sampled_from(MODELS), st.booleans())


def simulate_model(
    program: Program, costs: Costs, progress_model: ProgressModel, *, blocking_hosts: bool
) -> Timeline:
    progress_model = "blocking_serial" if blocking_hosts else progress_model
    return simulate(program, costs, progress_model=progress_model, blocking_hosts=blocking_hosts)


@given(CASES, st.integers(1, 3), COST, COST)
def test_free_zero_collectives_equal_plain_data_parallelism(
    case: tuple[str, ProgressModel, bool], zero: int, step: float, send: float
) -> None:
    name, model, blocks = case
    costs = Costs(F=1, B=2, step=step, send=send)
    plain = simulate_model(compile_zero(name, dp=2), costs, model, blocking_hosts=blocks)
    assert (
        simulate_model(
            compile_zero(name, dp=2, zero=zero), costs, model, blocking_hosts=blocks
        ).span
        == plain.span
    )


@given(CASES, st.integers(1, 3), st.sampled_from(["unshard", "reduce_scatter"]), COST, COST)
def test_higher_cost_never_shortens_span(
    case: tuple[str, ProgressModel, bool], zero: int, which: str, first: float, second: float
) -> None:
    name, model, blocks = case
    program = compile_zero(name, dp=2, zero=zero)
    spans = [
        simulate_model(program, Costs(F=1, B=2, **{which: cost}), model, blocking_hosts=blocks).span
        for cost in sorted([first, second])
    ]
    assert spans[0] <= spans[1] + 1e-9


# ---------------------------------------------------------------- waits for weights


def test_unshard_waits_have_idle_cause() -> None:
    """One rank waits for its first unshard. Every other unshard overlaps with longer work."""
    program = compile(schedules.looped_bfs, PipelineShape(1, 4, 4), dp=2, zero=3)
    run = simulate(program, Costs(F=1, B=2, unshard=0.5, reduce_scatter=0.25))
    table = sum_by_cause(idleness(run), 1)
    assert table[0, IdleCause.WEIGHTS] == 0.5 and table[0, IdleCause.REDUCTION] == 0.25
    assert table.sum() == run.idle.sum() == 0.75
    idle = idleness(run)
    waited = run.spans["op"][idle["awaited_span"][idle["cause"] == IdleCause.WEIGHTS]]
    assert {*waited.tolist()} == {Opcode.Unshard}


@pytest.mark.parametrize("name", ZOO)
def test_calibrate_finds_unshard_cost(name: str) -> None:
    """Costs come from waits for unshards. An unshard that delayed no instruction costs 0."""
    program = compile_zero(name, dp=2, zero=3)
    costs = Costs(F=1, B=2, unshard=1.5, reduce_scatter=2.5)
    run = replace(simulate(program, costs), kind="measured", unit="s")
    calibrated = calibrate(run)
    assert (calibrated.unshard, calibrated.reduce_scatter) == (1.5, 2.5)
    assert simulate(program, calibrated).span == pytest.approx(run.span)


def test_advice_tries_free_unshards() -> None:
    program = compile(schedules.looped_bfs, PipelineShape(1, 4, 4), dp=2, zero=3)
    run = simulate(program, Costs(F=1, B=2, unshard=7))
    best = {
        change.description: change.saved_share
        for change in advise(run, Costs(F=1, B=2, unshard=7)).changes
    }
    assert best["gathers of weights that take no time"] == pytest.approx(1 - 48 / run.span)


def test_advice_keeps_zero_level() -> None:
    """Other schedules are lowered with the same ZeRO level, and pay its costs."""
    program = compile(schedules.gpipe, PipelineShape(2, 4), dp=2, zero=3)
    costs = Costs(F=1, B=2, unshard=100)
    changes = advise(simulate(program, costs), costs).changes
    other_share = max(c.saved_share for c in changes if "gathers of weights" not in c.description)
    assert other_share < 0.6  # twice as many microbatches have as many gathers
