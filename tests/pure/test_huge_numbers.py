"""Tests that an impossibly large number in a file or option gives one error with its place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from schedir import Costs, PipelineShape, compile, planner, schedules, simulate
from schedir.__main__ import main
from schedir.errors import CostsError, SchedirError, UsageError, describe
from schedir.ir.cost.sizes import Sizes

HUGE_INTEGER = "9" * 400  # Python converts it to an int, but not to a float
CLUSTER = {
    "nodes": "1", "gpus_per_node": "4", "flops": "1e14", "memory": "8e10", "hbm_bandwidth": "2e12",
    "nvlink_bandwidth": "3e11", "network_bandwidth": "2e10",
}  # fmt: skip
MODEL = {"layers": "4", "hidden": "64", "heads": "4", "vocab": "128", "sequence": "32"}


def format_toml(table: dict[str, str]) -> str:
    return "".join(f"{name} = {value}\n" for name, value in table.items())


def read_refusal(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the single error of a command."""
    assert main(argv) == 2
    text = capsys.readouterr().err
    assert "Traceback" not in text and "Warning" not in text and len(text) < 500, text
    return text


@pytest.mark.parametrize(
    "value", [HUGE_INTEGER, f"-{HUGE_INTEGER}", f'"{HUGE_INTEGER}"', "inf", "nan", "1e400"]
)
@pytest.mark.parametrize("name", [*CLUSTER, "processors", "latency", "host_memory"])
def test_huge_number_in_cluster_file_is_refused(
    name: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(format_toml(CLUSTER | {name: value}))
    model = [f"--{key}={number}" for key, number in MODEL.items()]
    text = read_refusal(["plan", *model, "--batch=8", "--cluster", str(path)], capsys)
    assert f"{path}, line " in text and name in text


@pytest.mark.parametrize("value", [HUGE_INTEGER, "999999999", "-1", "inf", "1e3"])
@pytest.mark.parametrize("name", [*MODEL, "ffn", "kv_heads", "experts"])
def test_huge_number_in_model_file_is_refused(
    name: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With `HUGE_INTEGER` the file has a table `[model]`, otherwise top-level keys."""
    path = tmp_path / "model.toml"
    path.write_text("[model]\n" * (value == HUGE_INTEGER) + format_toml(MODEL | {name: value}))
    other_options = ["--cluster=a100", "--gpus=8", "--batch=8"]
    text = read_refusal(["plan", "--model", str(path), *other_options], capsys)
    assert name in text or "is not known" in text


def test_huge_layer_count_in_train_config_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.toml"
    path.write_text("[model]\nlayers = 999999999\n")
    text = read_refusal(["train", str(path)], capsys)
    assert f"{path}, line 2" in text and "layers is 999999999; it must be at most 65536" in text


def test_errors_do_not_print_huge_integers() -> None:
    assert describe(10**30 - 1) == "9" * 30
    assert describe(10**5000) == describe(-(10**30)) == "an integer of more than 30 digits"
    cluster = planner.cluster_preset("a100")
    huge = 10**5000  # Python refuses to write its digits
    constructors: dict[str, Callable[[], object]] = {
        "cluster": lambda: replace(cluster, nodes=huge),
        "rate": lambda: replace(cluster, flops=huge),
        "model": lambda: planner.TransformerSpec(huge, 64, 4, vocab=128, sequence=32),
        "choice": lambda: planner.ParallelPlan(pp=huge),
        "layers_of": lambda: planner.ParallelPlan(layers_per_stage=(huge,)),
        "costs": lambda: Costs(F=huge),
        "sizes": lambda: Sizes(saved=huge),
        "shape": lambda: PipelineShape(huge, 1),
    }
    for name, construct in constructors.items():
        with pytest.raises(SchedirError) as caught:
            construct()
        assert len(str(caught.value)) < 200, name


def test_size_above_limit_is_refused() -> None:
    with pytest.raises(UsageError, match=r"size saved must be at most 1e\+30, not 1e\+31"):
        Sizes(saved=1e31)


def test_too_large_sum_of_costs_is_refused() -> None:
    program = compile(schedules.gpipe, PipelineShape(2, 8))
    for forward in (1e300, 1e308):
        with pytest.raises(CostsError, match=r"add up to more than 1e\+300"):
            simulate(program, Costs(F=forward, B=0))
    simulate(program, Costs(F=1e298, B=0)).idle.sum()
