"""Clusters: times of collectives and links, and the costs that a cluster fills in."""

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
    save_timeline,
    schedules,
    simulate,
)
from schedir.__main__ import main
from schedir.errors import ConfigError, CostsError, UsageError
from tests.commands import run_command

ROOT = Path(__file__).parents[2]
FIVE = ("simulate", "explain", "compare", "recommend", "draw")
SIZES = Sizes(activation=60e6, params=2e9, grads=4e9, optimizer=12e9)
OPTION = "--sizes=activation=60MB,params=2GB,grads=4GB,optimizer=12GB"


def cluster(nodes: int = 2, gpus_per_node: int = 4, **more: Any) -> Cluster:
    usual: dict[str, Any] = {
        "flops": 300e12, "memory": 80e9, "hbm_bandwidth": 2e12, "nvlink_bandwidth": 300e9,
        "network_bandwidth": 20e9,
        "latency": 1e-5, "kernel_us": 5,
    }  # fmt: skip
    return Cluster(nodes, gpus_per_node, **(usual | more))


# ---------------------------------------------------------------- formulas


def walked(of: Cluster, size: float, processes: list[int], turns: int) -> float:
    """Return the time of some turns of a ring collective, by simulating each message.

    There is one ring for each link out of a node. The rings divide the bytes and NVLink among them.
    A message starts when the previous message has arrived and its link is free.
    """
    node = [p // of.gpus_per_node for p in processes]
    rings = min(node.count(n) for n in node) if len({*node}) > 1 else 1
    g, latest = len(processes), 0.0
    for _ in range(rings):
        free, came = [0.0] * g, [0.0] * g
        for _ in range(turns):
            arrives = [0.0] * g
            for k in range(g):
                after = (k + 1) % g
                width = (
                    of.nvlink_bandwidth / rings if node[k] == node[after] else of.network_bandwidth
                )
                width = min(width, of.nvlink_bandwidth / rings)
                free[k] = max(free[k], came[k]) + of.latency + size / rings / g / width
                arrives[after] = free[k]
            came = arrives
        latest = max(latest, *came)
    return latest


@given(
    nodes=st.integers(1, 4), each=st.integers(1, 4), apart=st.integers(1, 4),
    size=st.floats(1, 1e10), nvlink=st.floats(1e9, 1e12), network=st.floats(1e9, 1e12),
)  # fmt: skip
def test_rings_take_what_their_messages_take(
    nodes: int, each: int, apart: int, size: float, nvlink: float, network: float
) -> None:
    """Compare collectives of any number of processes per node with the simulated rings."""
    of = cluster(nodes, each * apart, nvlink_bandwidth=nvlink, network_bandwidth=network)
    ring = [n * each * apart + k * apart for n in range(nodes) for k in range(each)]
    g = len(ring)
    once = walked(of, size, ring, g - 1) if g > 1 else 0.0
    assert of.all_gather_time(size, ring) == pytest.approx(once)
    assert of.reduce_scatter_time(size, ring) == pytest.approx(once)
    twice = walked(of, size, ring, 2 * (g - 1)) if g > 1 else 0.0
    assert of.all_reduce_time(size, ring) == pytest.approx(twice)


def test_formulas_of_one_gpu() -> None:
    of = cluster(host_bandwidth=12e9, disk_bandwidth=2e9)
    assert of.gemm_time(4096, 4096, 4096) == 2 * 4096**3 / 300e12  # limited by compute
    assert of.gemm_time(4096, 1, 4096) == 2 * (4096**2 + 2 * 4096) / 2e12  # limited by memory
    assert of.gemm_time(1, 1, 1) == 5e-6 == of.elementwise_time(2)  # limited by the launch
    assert of.elementwise_time(2e9) == 1e-3
    assert of.host_transfer_time(12e9) == 1 + 1e-5 and of.disk_transfer_time(2e9) == 1 + 1e-5
    assert of.send_time(3e9, 0, 3) == 0.01 + 1e-5 and of.send_time(2e9, 3, 4) == 0.1 + 1e-5
    assert (
        of.send_time(1e9, 2, 2) == of.all_reduce_time(1e9, 1) == of.small_all_reduce_time(8, 1) == 0
    )
    assert of.small_all_reduce_time(8, 4) == pytest.approx(2 * (1e-5 + 8 / 300e9))
    for name in ("host", "disk"):
        with pytest.raises(UsageError) as caught:
            getattr(cluster(), f"{name}_transfer_time")(1)
        assert caught.value.fields == (f"{name}_bandwidth",)


@pytest.mark.parametrize("processes", [0, 9, -1, [], [0, 8], [-1, 0], [1, 1]])
def test_groups_are_processes_of_the_cluster(processes: Any) -> None:
    of = cluster()  # 8 processes
    for collective in (
        of.all_gather_time,
        of.reduce_scatter_time,
        of.all_reduce_time,
        of.small_all_reduce_time,
    ):
        with pytest.raises(UsageError) as caught:
            collective(1e6, processes)
        assert caught.value.fields == ("processes",)
    with pytest.raises(UsageError) as caught:
        of.send_time(1e6, 0, 8)
    with pytest.raises(UsageError) as caught:
        of.send_time(-1, 0, 1)
    assert caught.value.fields == ("size",)


# ---------------------------------------------------------------- filling in costs


def test_links_are_those_of_the_nodes_that_processes_are_on() -> None:
    """Four ranks are on two nodes. Stage 1 sends to the other node, and stage 2 sends back."""
    costs = cluster(2, 2).fill_costs(PipelineShape(4, 8), SIZES, Costs(F=1, B=2))
    near, far = 1e-5 + 60e6 / 300e9, 1e-5 + 60e6 / 20e9
    assert costs.send == pytest.approx((near, far, far, near))
    assert costs.step == pytest.approx((2 * 2e9 + 4e9 + 2 * 12e9) / 2e12)
    assert (costs.reduce_grads, costs.tp_scatter, costs.tp_gather) == (0, 0, 0)
    assert costs.reduce_norm == pytest.approx(2 * (1e-5 + 8 / (2 * 20e9)))
    assert (costs.F, costs.B, costs.I, costs.W) == (1, 2, 1, 1)


def test_slices_and_replicas() -> None:
    """Processes are numbered by tensor-parallel rank, then rank, then replica."""
    of = cluster(3, 8)
    costs = of.fill_costs(PipelineShape(4, 8), SIZES, Costs(F=1, I=1, W=1), tp=2, dp=3)
    assert costs.send == pytest.approx(1e-5 + 30e6 / 300e9)
    assert costs.tp_gather == pytest.approx(of.all_gather_time(60e6, 2))
    assert costs.tp_scatter == pytest.approx(2 * 30e6 / 2e12)
    assert costs.reduce_grads == pytest.approx(of.all_reduce_time(4e9, range(0, 24, 8)))
    beside = cluster(4, 6).fill_costs(PipelineShape(4, 8), SIZES, Costs(F=1, I=1, W=1), tp=2, dp=3)
    assert beside.reduce_grads == pytest.approx(cluster(4, 6).all_reduce_time(4e9, [0, 8, 16]))
    # In some replica, each boundary is between two nodes.
    assert beside.send == pytest.approx(1e-5 + 30e6 / 20e9)


def test_a_mesh_says_where_processes_are() -> None:
    """A mesh gives other places to processes: here replicas are adjacent, as in Megatron-LM."""
    of, told = cluster(2, 4), Costs(F=1, I=1, W=1)
    mesh = np.arange(8).reshape(2, 4, 1).swapaxes(0, 1)  # [replica, rank, tensor-parallel rank]
    costs = of.fill_costs(PipelineShape(2, 8), SIZES, told, dp=4, mesh=mesh)
    assert costs.reduce_grads == pytest.approx(of.all_reduce_time(4e9, 4))
    assert costs.send == pytest.approx(1e-5 + 60e6 / 20e9)
    usual = of.fill_costs(PipelineShape(2, 8), SIZES, told, dp=4)
    assert usual.reduce_grads == pytest.approx(of.all_reduce_time(4e9, [0, 2, 4, 6]))
    assert usual.send == pytest.approx(1e-5 + 60e6 / 300e9)
    with pytest.raises(UsageError):
        of.fill_costs(PipelineShape(2, 8), SIZES, told, dp=4, mesh=mesh.T)


def test_bytes_of_each_stage_and_microbatch() -> None:
    sizes = replace(SIZES, activation=((3e6, 6e6), (9e6, 3e6), (0, 0)), grads=(1e9, 2e9, 0))
    costs = cluster(1, 6, latency=0).fill_costs(PipelineShape(3, 2), sizes, Costs(F=1, B=1), dp=2)
    us = np.array(costs.send) * 1e6
    assert us.tolist() == pytest.approx(np.array([[10, 20], [30, 20], [30, 10]]))
    assert costs.reduce_grads == pytest.approx((1e9 / 300e9, 2e9 / 300e9, 0))


def test_holders_and_stages_beside_each_other() -> None:
    """Adjacent stages on one rank send nothing. Stage replicas reduce over their ranks."""
    near = cluster(1, 2).fill_costs(
        PipelineShape(2, 4, placement=(0, 0, 1)), SIZES, Costs(F=1, B=1)
    )
    assert near.send == pytest.approx((0, 1e-5 + 60e6 / 300e9, 1e-5 + 60e6 / 300e9))
    assert near.step == pytest.approx((0.032, 0.016, 0.016))
    mirror = PipelineShape(2, 4, placement="mirror")
    assert cluster(2, 1).fill_costs(
        mirror, SIZES, Costs(F=1, B=1)
    ).reduce_replicated_stages == pytest.approx(cluster(2, 1).all_reduce_time(4e9, 2))


@given(st.sets(st.sampled_from(["send", "step", "reduce_grads", "reduce_norm", "tp_gather"])))
def test_what_is_told_stays(names: set[str]) -> None:
    told = Costs(F=1, I=2, W=3, **dict.fromkeys(names, 0.0))
    found = cluster(2, 4).fill_costs(PipelineShape(2, 4), SIZES, told, tp=2, dp=2)
    for name, cost in told.specified.items():
        assert getattr(found, name) == cost
    # The size of tied weights is unknown. B follows from I and W.
    assert found.reduce_tied is None and found.B is None
    assert {"send", "step", "reduce_grads", "tp_gather"} - names <= {
        name for name, cost in found.specified.items() if cost
    }


def test_only_what_is_filled_needs_bytes() -> None:
    of, shape = cluster(2, 4), PipelineShape(2, 4)
    told = {"send": 0, "tp_scatter": 0, "tp_gather": 0, "reduce_grads": 0, "step": 0}
    for name, sizes in [("send", {"activation"}), ("tp_scatter", {"activation"}),
                        ("tp_gather", {"activation"}), ("reduce_grads", {"grads"}),
                        ("step", {"params", "grads", "optimizer"})]:  # fmt: skip
        rest = {other: cost for other, cost in told.items() if other != name}
        with pytest.raises(UsageError) as caught:
            of.fill_costs(shape, Sizes(model_states=1e9), Costs(F=1, B=2, **rest), tp=2, dp=2)
        assert {*caught.value.fields} == sizes
    assert of.fill_costs(shape, None, Costs(F=1, B=2, **told), tp=2, dp=2).send == 0


@pytest.mark.parametrize(
    "told", [{}, {"F": 1}, {"B": 2}, {"F": 1, "I": 1}, {"F": 1, "B": 2, "I": 1}]
)
def test_compute_must_be_told(told: set[str]) -> None:
    """Costs of compute are required, because a default of 1 would mean a second."""
    with pytest.raises(CostsError):
        cluster(1, 2).fill_costs(PipelineShape(2, 4), SIZES, Costs(**dict.fromkeys(told, 1.0)))


@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (2, 1), (3, 2), (8, 2)])
def test_gpus_are_the_product(tp: int, dp: int) -> None:
    with pytest.raises(UsageError) as caught:
        cluster(2, 8).fill_costs(PipelineShape(4, 4), SIZES, Costs(F=1, B=1), tp=tp, dp=dp)
    assert {"nodes", "gpus_per_node", "tp", "dp"} <= {*caught.value.fields}


# ---------------------------------------------------------------- numbers and files


def test_texts_have_units() -> None:
    text = cluster(
        nodes="2", flops="300TFLOP/s", memory="80GB",  # type: ignore[arg-type]
        hbm_bandwidth="2TB/s", nvlink_bandwidth="300 GB/s",
        network_bandwidth="20e9", latency="10us", kernel_us="5",
    )  # fmt: skip
    assert text == cluster() and text.gpu_count == 8
    assert cluster(latency="1ms").latency == cluster(latency="0.001s").latency == 1e-3
    assert cluster(memory="64GiB").memory == 64 * 2**30
    with pytest.raises(FrozenInstanceError):
        text.nodes = 3  # type: ignore[misc]


WRONG: dict[str, list[Any]] = {
    "nodes": [0, -1, 1.5, True, "two", None],
    "flops": [0, -1e12, float("inf"), "312 TFLOPs", "312T"],
    "memory": ["80 gigabytes", "80GB/s", 0, []],
    "nvlink_bandwidth": ["300GB", "300Gb/s", "-300GB/s", float("nan"), ""],
    "network_bandwidth": ["200Gbit/s", 0, b"1"],
    "latency": [-1e-6, "5 minutes", "5us/s"],
    "host_bandwidth": [0, "12GB"],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, some in WRONG.items() for v in some])
def test_what_is_no_number_of_a_field(name: str, value: Any) -> None:
    with pytest.raises(UsageError) as caught:
        cluster(**{name: value})
    assert caught.value.fields == (name,)


def test_the_example_is_read() -> None:
    of = load_cluster(ROOT / "examples" / "selene.toml")
    assert (of.gpu_count, of.flops, of.network_bandwidth) == (16, 312e12, 25e9)


@pytest.mark.parametrize(
    ("line", "name"),
    [("nvlnk = 1", "nvlnk"), ('flops = "x"', "flops"), ("memory = [1]", "memory"),
     ("[network_bandwidth]", "network_bandwidth"), ("latency = -1", "latency"),
     ("nodes = true", "nodes")],
)  # fmt: skip
def test_a_file_says_where(line: str, name: str, tmp_path: Path) -> None:
    rest = [
        f.name for f in fields(Cluster) if f.name not in (name, "host_bandwidth", "disk_bandwidth")
    ]
    path = tmp_path / "cluster.toml"
    path.write_text("".join(f"{other} = 1\n" for other in rest) + f"  {line}\n")
    with pytest.raises(ConfigError) as caught:
        load_cluster(path)
    assert caught.value.fields == (name,)
    assert (caught.value.line, caught.value.column) == (len(rest) + 1, 3 + ("[" in line[:1]))
    path.write_text("nodes = 1\n")
    with pytest.raises(ConfigError) as caught:
        load_cluster(path)
    assert caught.value.fields == ("gpus_per_node",)


# ---------------------------------------------------------------- commands


def _shape(command: str) -> list[str]:
    sources = {"compare": ["gpipe", "zb_h1"], "recommend": []}.get(command, ["zb_h1"])
    shape = ["--ranks=4", "--microbatches=4", "-O", "tp=2", "-O", "dp=2", OPTION]
    return [command, *sources, *shape, f"--cluster={ROOT}/examples/selene.toml"]


@pytest.mark.parametrize("command", FIVE)
def test_commands_say_what_is_filled(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Commands print the costs that the cluster fills in, and simulate with them."""
    of = load_cluster(ROOT / "examples" / "selene.toml")
    costs = of.fill_costs(PipelineShape(4, 4), SIZES, Costs(F=0.01, B=0.02, send=1e-3), tp=2, dp=2)
    told = "--costs=F=0.01,B=0.02,send=1e-3"
    line = run_command(capsys, *_shape(command), told).partition(
        "costs from the cluster, in seconds: "
    )[2]
    assert "I=" in line and "reduce_grads=" in line and "send" not in line
    if command in ("simulate", "explain", "compare"):
        found = json.loads(run_command(capsys, *_shape(command), told, "--json"))
        found = found[-1] if command == "compare" else found
        assert found["cluster_costs"]["reduce_grads"] == costs.reduce_grads
        assert found["unit"] == "s" and "send" not in found["cluster_costs"]
        program = compile(schedules.zb_h1, PipelineShape(4, 4), tp=2, dp=2, costs=costs)
        assert found["span"] == simulate(program, costs).span


def test_a_program_in_a_file_brings_its_groups(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program file has tp and dp, so the command needs no options for them."""
    told = "--costs=F=0.01,B=0.02"
    file, shape = str(tmp_path / "zb_h1.sched"), _shape("simulate")
    run_command(capsys, "print", "zb_h1", *shape[2:8], "-o", file)
    by_file = run_command(capsys, "simulate", file, *shape[8:], told, "--json")
    of_both = [json.loads(text) for text in (by_file, run_command(capsys, *shape, told, "--json"))]
    assert of_both[0]["cluster_costs"] == of_both[1]["cluster_costs"]
    assert of_both[0]["span"] == of_both[1]["span"]


def test_what_stays_free_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    told = [*_shape("simulate"), "--costs=F=0.01,B=0.02", "-O", "tied_weights"]
    assert "reduce_tied" in run_command(capsys, *told)
    assert "reduce_tied" not in run_command(
        capsys, *told[:-3], told[-3] + ",reduce_tied=0.001", "-O", "tied_weights"
    )


REFUSED = (ROOT / "tests" / "golden" / "cluster.txt").read_text().split("\n\n")


@pytest.mark.parametrize("told", REFUSED, ids=range(len(REFUSED)))
def test_what_a_person_is_told(
    told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "examples" / "selene.toml").read_text()
    Path("selene.toml").write_text(text)
    Path("bits.toml").write_text(text.replace("25GB/s", "200Gb/s"))
    Path("misspelt.toml").write_text(text.replace("nvlink_bandwidth", "nvlnk_bandwidth"))
    Path("less.toml").write_text(text.replace("network_bandwidth", "# network_bandwidth"))
    Path("negative.toml").write_text(text.replace('"80GB"', "-80e9"))
    Path("broken.toml").write_text("nodes = \n")
    save_timeline(simulate(compile(schedules.gpipe, PipelineShape(4, 4))), "run.timeline")
    command, message = told.strip().split("\n", 1)
    assert main(command.removeprefix("$ schedir ").split()) == 2
    assert capsys.readouterr().err == message + "\n"


def test_the_command_of_the_example_can_be_copied(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    lines = (ROOT / "examples" / "selene.toml").read_text().splitlines()
    (command,) = (line for line in lines if line.startswith("# schedir "))
    assert main(shlex.split(command.removeprefix("# schedir "))) == 0
    assert "zb_h1, predicted" in capsys.readouterr().out
