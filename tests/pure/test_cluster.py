"""Tests of clusters: times of collectives and links, and the costs that a cluster computes."""

from __future__ import annotations

import json
import shlex
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedir import (
    Cluster,
    Costs,
    PipelineShape,
    Sizes,
    compile,
    load_cluster,
    schedules,
    simulate,
)
from schedir.__main__ import main
from schedir.errors import ConfigError, CostsError, UsageError
from tests.commands import run_command

ROOT = Path(__file__).parents[2]
COMMANDS = ("simulate", "explain", "compare", "recommend", "draw")
SIZES = Sizes(activation=60e6, params=2e9, grads=4e9, optimizer=12e9)
OPTION = "--sizes=activation=60MB,params=2GB,grads=4GB,optimizer=12GB"


def make_cluster(nodes: int = 2, gpus_per_node: int = 4, **overrides: Any) -> Cluster:
    defaults: dict[str, Any] = {
        "flops": 300e12, "memory": 80e9, "hbm_bandwidth": 2e12, "nvlink_bandwidth": 300e9,
        "network_bandwidth": 20e9,
        "latency": 1e-5, "kernel_us": 5,
    }  # fmt: skip
    return Cluster(nodes, gpus_per_node, **(defaults | overrides))


# ---------------------------------------------------------------- formulas


def simulate_ring(cluster: Cluster, size: float, processes: list[int], turns: int) -> float:
    """Return the time of `turns` turns of a ring collective, by simulating each message.

    There is one ring for each link out of a node. The rings divide the bytes and NVLink among them.
    A message starts when the previous message has arrived and its link is free.
    """
    node = [p // cluster.gpus_per_node for p in processes]
    rings = min(node.count(n) for n in node) if len({*node}) > 1 else 1
    g, latest = len(processes), 0.0
    for _ in range(rings):
        link_free, arrivals = [0.0] * g, [0.0] * g
        for _ in range(turns):
            next_arrivals = [0.0] * g
            for k in range(g):
                neighbour = (k + 1) % g
                bandwidth = (
                    cluster.nvlink_bandwidth / rings
                    if node[k] == node[neighbour]
                    else cluster.network_bandwidth
                )
                bandwidth = min(bandwidth, cluster.nvlink_bandwidth / rings)
                link_free[k] = (
                    max(link_free[k], arrivals[k]) + cluster.latency + size / rings / g / bandwidth
                )
                next_arrivals[neighbour] = link_free[k]
            arrivals = next_arrivals
        latest = max(latest, *arrivals)
    return latest


@given(
    nodes=st.integers(1, 4), each=st.integers(1, 4), apart=st.integers(1, 4),
    size=st.floats(1, 1e10), nvlink=st.floats(1e9, 1e12), network=st.floats(1e9, 1e12),
)  # fmt: skip
def test_collective_times_match_simulated_rings(
    nodes: int, each: int, apart: int, size: float, nvlink: float, network: float
) -> None:
    """Compare collectives of any number of processes per node with the simulated rings."""
    cluster = make_cluster(nodes, each * apart, nvlink_bandwidth=nvlink, network_bandwidth=network)
    ring = [n * each * apart + k * apart for n in range(nodes) for k in range(each)]
    g = len(ring)
    once = simulate_ring(cluster, size, ring, g - 1) if g > 1 else 0.0
    assert cluster.all_gather_time(size, ring) == pytest.approx(once)
    assert cluster.reduce_scatter_time(size, ring) == pytest.approx(once)
    twice = simulate_ring(cluster, size, ring, 2 * (g - 1)) if g > 1 else 0.0
    assert cluster.all_reduce_time(size, ring) == pytest.approx(twice)


def test_times_of_links() -> None:
    cluster = make_cluster(host_bandwidth=12e9, disk_bandwidth=2e9)
    assert cluster.host_transfer_time(12e9) == 1 + 1e-5
    assert cluster.disk_transfer_time(2e9) == 1 + 1e-5
    assert cluster.send_time(3e9, 0, 3) == 0.01 + 1e-5
    assert cluster.send_time(2e9, 3, 4) == 0.1 + 1e-5
    assert (
        cluster.send_time(1e9, 2, 2)
        == cluster.all_reduce_time(1e9, 1)
        == cluster.small_all_reduce_time(8, 1)
        == 0
    )
    assert cluster.small_all_reduce_time(8, 4) == pytest.approx(2 * (1e-5 + 8 / 300e9))
    for name in ("host", "disk"):
        with pytest.raises(UsageError) as caught:
            getattr(make_cluster(), f"{name}_transfer_time")(1)
        assert caught.value.fields == (f"{name}_bandwidth",)


@pytest.mark.parametrize("processes", [0, 9, -1, [], [0, 8], [-1, 0], [1, 1]])
def test_processes_outside_cluster_are_refused(processes: Any) -> None:
    cluster = make_cluster()  # 8 processes
    for collective in (
        cluster.all_gather_time,
        cluster.reduce_scatter_time,
        cluster.all_reduce_time,
        cluster.small_all_reduce_time,
    ):
        with pytest.raises(UsageError) as caught:
            collective(1e6, processes)
        assert caught.value.fields == ("processes",)
    with pytest.raises(UsageError) as caught:
        cluster.send_time(1e6, 0, 8)
    with pytest.raises(UsageError) as caught:
        cluster.send_time(-1, 0, 1)
    assert caught.value.fields == ("size",)


# ---------------------------------------------------------------- filling in costs


def test_send_costs_follow_nodes_of_ranks() -> None:
    """Four ranks are on two nodes. Stage 1 sends to the other node, and stage 2 sends back."""
    costs = make_cluster(2, 2).fill_costs(PipelineShape(4, 8), SIZES, Costs(F=1, B=2))
    within_node, between_nodes = 1e-5 + 60e6 / 300e9, 1e-5 + 60e6 / 20e9
    assert costs.send == pytest.approx((within_node, between_nodes, between_nodes, within_node))
    assert costs.step == pytest.approx((2 * 2e9 + 4e9 + 2 * 12e9) / 2e12)
    assert (costs.reduce_grads, costs.tp_scatter, costs.tp_gather) == (0, 0, 0)
    assert costs.reduce_norm == pytest.approx(2 * (1e-5 + 8 / (2 * 20e9)))
    assert (costs.F, costs.B, costs.I, costs.W) == (1, 2, 1, 1)


def test_costs_of_tensor_parallel_ranks_and_replicas() -> None:
    """Processes are numbered by tensor-parallel rank, then rank, then replica."""
    cluster = make_cluster(3, 8)
    costs = cluster.fill_costs(PipelineShape(4, 8), SIZES, Costs(F=1, I=1, W=1), tp=2, dp=3)
    assert costs.send == pytest.approx(1e-5 + 30e6 / 300e9)
    assert costs.tp_gather == pytest.approx(cluster.all_gather_time(60e6, 2))
    assert costs.tp_scatter == pytest.approx(2 * 30e6 / 2e12)
    assert costs.reduce_grads == pytest.approx(cluster.all_reduce_time(4e9, range(0, 24, 8)))
    other_nodes = make_cluster(4, 6).fill_costs(
        PipelineShape(4, 8), SIZES, Costs(F=1, I=1, W=1), tp=2, dp=3
    )
    assert other_nodes.reduce_grads == pytest.approx(
        make_cluster(4, 6).all_reduce_time(4e9, [0, 8, 16])
    )
    # In some replica, each boundary is between two nodes.
    assert other_nodes.send == pytest.approx(1e-5 + 30e6 / 20e9)


def test_mesh_places_processes_on_nodes() -> None:
    """A mesh numbers processes in another order: here replicas are adjacent, as in Megatron-LM."""
    cluster, compute_costs = make_cluster(2, 4), Costs(F=1, I=1, W=1)
    mesh = np.arange(8).reshape(2, 4, 1).swapaxes(0, 1)  # [replica, rank, tensor-parallel rank]
    costs = cluster.fill_costs(PipelineShape(2, 8), SIZES, compute_costs, dp=4, mesh=mesh)
    assert costs.reduce_grads == pytest.approx(cluster.all_reduce_time(4e9, 4))
    assert costs.send == pytest.approx(1e-5 + 60e6 / 20e9)
    without_mesh = cluster.fill_costs(PipelineShape(2, 8), SIZES, compute_costs, dp=4)
    assert without_mesh.reduce_grads == pytest.approx(cluster.all_reduce_time(4e9, [0, 2, 4, 6]))
    assert without_mesh.send == pytest.approx(1e-5 + 60e6 / 300e9)
    with pytest.raises(UsageError):
        cluster.fill_costs(PipelineShape(2, 8), SIZES, compute_costs, dp=4, mesh=mesh.T)


def test_costs_follow_sizes_of_stage_and_microbatch() -> None:
    sizes = replace(SIZES, activation=((3e6, 6e6), (9e6, 3e6), (0, 0)), grads=(1e9, 2e9, 0))
    costs = make_cluster(1, 6, latency=0).fill_costs(
        PipelineShape(3, 2), sizes, Costs(F=1, B=1), dp=2
    )
    us = np.array(costs.send) * 1e6
    assert us.tolist() == pytest.approx(np.array([[10, 20], [30, 20], [30, 10]]))
    assert costs.reduce_grads == pytest.approx((1e9 / 300e9, 2e9 / 300e9, 0))


def test_costs_of_adjacent_stages_and_stage_replicas() -> None:
    """Adjacent stages on one rank send nothing. Stage replicas reduce over their ranks."""
    costs = make_cluster(1, 2).fill_costs(
        PipelineShape(2, 4, placement=(0, 0, 1)), SIZES, Costs(F=1, B=1)
    )
    assert costs.send == pytest.approx((0, 1e-5 + 60e6 / 300e9, 1e-5 + 60e6 / 300e9))
    assert costs.step == pytest.approx((0.032, 0.016, 0.016))
    mirror = PipelineShape(2, 4, placement="mirror")
    assert make_cluster(2, 1).fill_costs(
        mirror, SIZES, Costs(F=1, B=1)
    ).reduce_replicated_stages == pytest.approx(make_cluster(2, 1).all_reduce_time(4e9, 2))


@given(st.sets(st.sampled_from(["send", "step", "reduce_grads", "reduce_norm", "tp_gather"])))
def test_specified_costs_are_kept(names: set[str]) -> None:
    specified = Costs(F=1, I=2, W=3, **dict.fromkeys(names, 0.0))
    filled = make_cluster(2, 4).fill_costs(PipelineShape(2, 4), SIZES, specified, tp=2, dp=2)
    for name, cost in specified.specified.items():
        assert getattr(filled, name) == cost
    # The size of tied weights is unknown. B follows from I and W.
    assert filled.reduce_tied is None and filled.B is None
    assert {"send", "step", "reduce_grads", "tp_gather"} - names <= {
        name for name, cost in filled.specified.items() if cost
    }


def test_only_filled_costs_need_sizes() -> None:
    cluster, shape = make_cluster(2, 4), PipelineShape(2, 4)
    zero_costs = {"send": 0, "tp_scatter": 0, "tp_gather": 0, "reduce_grads": 0, "step": 0}
    for name, sizes in [("send", {"activation"}), ("tp_scatter", {"activation"}),
                        ("tp_gather", {"activation"}), ("reduce_grads", {"grads"}),
                        ("step", {"params", "grads", "optimizer"})]:  # fmt: skip
        other_costs = {other: cost for other, cost in zero_costs.items() if other != name}
        with pytest.raises(UsageError) as caught:
            cluster.fill_costs(
                shape, Sizes(model_states=1e9), Costs(F=1, B=2, **other_costs), tp=2, dp=2
            )
        assert {*caught.value.fields} == sizes
    assert cluster.fill_costs(shape, None, Costs(F=1, B=2, **zero_costs), tp=2, dp=2).send == 0


@pytest.mark.parametrize(
    "told", [{}, {"F": 1}, {"B": 2}, {"F": 1, "I": 1}, {"F": 1, "B": 2, "I": 1}]
)
def test_missing_compute_costs_are_refused(told: set[str]) -> None:
    """Costs of compute are required, because the default of 1 would be one second."""
    with pytest.raises(CostsError):
        make_cluster(1, 2).fill_costs(PipelineShape(2, 4), SIZES, Costs(**dict.fromkeys(told, 1.0)))


@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (2, 1), (3, 2), (8, 2)])
def test_gpu_count_must_match_parallel_degrees(tp: int, dp: int) -> None:
    with pytest.raises(UsageError) as caught:
        make_cluster(2, 8).fill_costs(PipelineShape(4, 4), SIZES, Costs(F=1, B=1), tp=tp, dp=dp)
    assert {"nodes", "gpus_per_node", "tp", "dp"} <= {*caught.value.fields}


# ---------------------------------------------------------------- numbers and files


def test_text_values_with_units() -> None:
    text = make_cluster(
        nodes="2", flops="300TFLOP/s", memory="80GB",  # type: ignore[arg-type]
        hbm_bandwidth="2TB/s", nvlink_bandwidth="300 GB/s",
        network_bandwidth="20e9", latency="10us", kernel_us="5",
    )  # fmt: skip
    assert text == make_cluster() and text.gpu_count == 8
    assert make_cluster(latency="1ms").latency == make_cluster(latency="0.001s").latency == 1e-3
    assert make_cluster(memory="64GiB").memory == 64 * 2**30
    with pytest.raises(FrozenInstanceError):
        text.nodes = 3  # type: ignore[misc]


INVALID_VALUES: dict[str, list[Any]] = {
    "nodes": [0, -1, 1.5, True, "two", None],
    "flops": [0, -1e12, float("inf"), "312 TFLOPs", "312T"],
    "memory": ["80 gigabytes", "80GB/s", 0, []],
    "nvlink_bandwidth": ["300GB", "300Gb/s", "-300GB/s", float("nan"), ""],
    "network_bandwidth": ["200Gbit/s", 0, b"1"],
    "latency": [-1e-6, "5 minutes", "5us/s"],
    "host_bandwidth": [0, "12GB"],
}


@pytest.mark.parametrize(
    ("name", "value"), [(n, v) for n, values in INVALID_VALUES.items() for v in values]
)
def test_invalid_field_value_is_refused(name: str, value: Any) -> None:
    with pytest.raises(UsageError) as caught:
        make_cluster(**{name: value})
    assert caught.value.fields == (name,)


def test_example_cluster_file_is_read() -> None:
    cluster = load_cluster(ROOT / "examples" / "selene.toml")
    assert (cluster.gpu_count, cluster.flops, cluster.network_bandwidth) == (16, 312e12, 25e9)


@pytest.mark.parametrize(
    ("line", "name"),
    [("nvlnk = 1", "nvlnk"), ('flops = "x"', "flops"), ("memory = [1]", "memory"),
     ("[network_bandwidth]", "network_bandwidth"), ("latency = -1", "latency"),
     ("nodes = true", "nodes")],
)  # fmt: skip
def test_cluster_file_error_has_line_and_column(line: str, name: str, tmp_path: Path) -> None:
    other_fields = [
        f.name for f in fields(Cluster) if f.name not in (name, "host_bandwidth", "disk_bandwidth")
    ]
    path = tmp_path / "cluster.toml"
    rates = ("flops", "peak", "fp8_peak", "fp4_peak", "memory", "host_memory")
    values = {name: 1e9 for name in other_fields if name in rates or name.endswith("_bandwidth")}
    values |= {"latency": 1e-6, "network_latency": 1e-6}
    lines = [f"{other} = {values.get(other, 1)}\n" for other in other_fields]
    path.write_text("".join(lines) + f"  {line}\n")
    with pytest.raises(ConfigError) as caught:
        load_cluster(path)
    assert caught.value.fields == (name,)
    assert caught.value.line == len(other_fields) + 1
    assert caught.value.column == 3 + ("[" in line[:1])
    path.write_text("nodes = 1\n")
    with pytest.raises(ConfigError) as caught:
        load_cluster(path)
    assert caught.value.fields == ("gpus_per_node",)


# ---------------------------------------------------------------- commands


def _command_with_cluster(command: str) -> list[str]:
    sources = {"compare": ["gpipe", "zb_h1"], "recommend": []}.get(command, ["zb_h1"])
    shape = ["--ranks=4", "--microbatches=4", "-O", "tp=2", "-O", "dp=2", OPTION]
    return [command, *sources, *shape, f"--cluster={ROOT}/examples/selene.toml"]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_print_and_use_cluster_costs(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands print the costs that the cluster fills in, and simulate with them."""
    cluster = load_cluster(ROOT / "examples" / "selene.toml")
    costs = cluster.fill_costs(
        PipelineShape(4, 4), SIZES, Costs(F=0.01, B=0.02, send=1e-3), tp=2, dp=2
    )
    option = "--costs=F=0.01,B=0.02,send=1e-3"
    line = run_command(capsys, *_command_with_cluster(command), option).partition(
        "costs from the cluster, in seconds"
    )[2]
    stages = ", for one of the 4 stages of a rank: "  # the best schedule for `recommend` has 4
    assert line.startswith(stages if command == "recommend" else ": ")
    assert "I=" in line and "reduce_grads=" in line and "send" not in line
    if command in ("simulate", "explain", "compare"):
        facts = json.loads(run_command(capsys, *_command_with_cluster(command), option, "--json"))
        facts = facts[-1] if command == "compare" else facts
        assert facts["cluster_costs"]["reduce_grads"] == costs.reduce_grads
        assert facts["unit"] == "s" and "send" not in facts["cluster_costs"]
        program = compile(schedules.zb_h1, PipelineShape(4, 4), tp=2, dp=2, costs=costs)
        assert facts["span"] == simulate(program, costs).span


def test_program_file_supplies_tp_and_dp(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program file contains tp and dp, so the command needs no options for them."""
    option = "--costs=F=0.01,B=0.02"
    file, shape = str(tmp_path / "zb_h1.sched"), _command_with_cluster("simulate")
    run_command(capsys, "print", "zb_h1", *shape[2:8], "-o", file)
    by_file = run_command(capsys, "simulate", file, *shape[8:], option, "--json")
    facts = [json.loads(text) for text in (by_file, run_command(capsys, *shape, option, "--json"))]
    assert facts[0]["cluster_costs"] == facts[1]["cluster_costs"]
    assert facts[0]["span"] == facts[1]["span"]


def test_simulate_lists_costs_that_stay_zero(capsys: pytest.CaptureFixture[str]) -> None:
    command = [*_command_with_cluster("simulate"), "--costs=F=0.01,B=0.02", "-O", "tied_weights"]
    assert "reduce_tied" in run_command(capsys, *command)
    assert "reduce_tied" not in run_command(
        capsys, *command[:-3], command[-3] + ",reduce_tied=0.001", "-O", "tied_weights"
    )


def test_command_in_example_file_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    lines = (ROOT / "examples" / "selene.toml").read_text().splitlines()
    (command,) = (line for line in lines if line.startswith("# schedir "))
    assert main(shlex.split(command.removeprefix("# schedir "))) == 0
    assert "zb_h1, predicted" in capsys.readouterr().out
