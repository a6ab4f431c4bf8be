"""Tests of `planner.calibrate` and `schedir plan --calibrate`, which fit constants to runs."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedir import Cluster, load_cluster, planner
from schedir.__main__ import main
from schedir.errors import ConfigError, SchedirError, UsageError
from schedir.planner import MeasuredRun, ParallelPlan, TransformerSpec
from schedir.planner.calibration import predict
from schedir.planner.hardware.step_time_errors import INTERVAL_QUANTILE

MODEL = TransformerSpec(16, 2048, 32, vocab=131072, sequence=4096, ffn=8192, gated=True)
STACK = planner.stack_preset("nanotron")
PRESET = planner.cluster_preset("h100-efa")
PLANS = [
    ParallelPlan(dp=8, microbatches=32),
    ParallelPlan(tp=4, dp=2, microbatches=128, sequence_parallel=True),
    ParallelPlan(dp=16, microbatches=1),
]


def predict_runs(cluster: Cluster, plans: list[ParallelPlan] = PLANS) -> list[MeasuredRun]:
    """Return runs that are as fast as a cluster predicts."""
    return [MeasuredRun(MODEL, p, predict(cluster, STACK, MODEL, p).step_time) for p in plans]


def test_calibrate_finds_cluster_constants() -> None:
    """The runs depend on the speeds of compute and host, so the fit finds both."""
    truth = replace(
        PRESET, flops=PRESET.flops * 0.8, hbm_bandwidth=PRESET.hbm_bandwidth * 0.8, kernel_us=40
    )
    calibration = planner.calibrate(PRESET, STACK, predict_runs(truth))
    assert max(map(abs, calibration.errors)) < 0.03
    assert calibration.cluster.flops == pytest.approx(truth.flops, rel=0.05)
    assert calibration.cluster.kernel_us == pytest.approx(40, rel=0.05)
    for constant in calibration.constants:
        assert constant.low <= getattr(truth, constant.name) <= constant.high, constant.name
    other_plan = ParallelPlan(pp=2, tp=2, dp=2, microbatches=64, sequence_parallel=True)
    seconds = predict(truth, STACK, MODEL, other_plan).step_time
    low, high = calibration.find_interval(MODEL, other_plan)
    assert low <= seconds <= high < 1.5 * low


def test_runs_as_predicted_keep_constants() -> None:
    calibration = planner.calibrate(PRESET, STACK, predict_runs(PRESET))
    for constant in calibration.constants:
        assert constant.value == pytest.approx(constant.prior, rel=1e-3)
    assert max(map(abs, calibration.errors)) < 1e-3


def test_outlier_run_changes_constants_little() -> None:
    plans = [ParallelPlan(dp=8, microbatches=m) for m in (4, 8, 16, 32, 64)]
    runs = predict_runs(PRESET, plans)
    with_outlier = [*runs[:-1], runs[-1]._replace(step_time=runs[-1].step_time * 5)]
    calibration = planner.calibrate(PRESET, STACK, with_outlier)
    assert calibration.cluster.flops == pytest.approx(PRESET.flops, rel=0.05)


def test_more_runs_narrow_intervals() -> None:
    few, many = (planner.calibrate(PRESET, STACK, predict_runs(PRESET)[:n]) for n in (1, 3))
    for a, b in zip(few.constants, many.constants, strict=True):
        assert b.high / b.low <= a.high / a.low * 1.001
    suggested = few.suggest_run()
    assert suggested is not None and suggested.gpus == 8
    runs = [*predict_runs(PRESET)[:1], *predict_runs(PRESET, [suggested])]
    added = planner.calibrate(PRESET, STACK, runs)
    assert max(a.high / a.low / (b.high / b.low)
               for a, b in zip(few.constants, added.constants, strict=True)) > 1.5  # fmt: skip


def test_extrapolations_are_listed() -> None:
    calibration = planner.calibrate(PRESET, STACK, predict_runs(PRESET))
    assert calibration.list_extrapolations(PLANS[0]) == []
    text = " ".join(calibration.list_extrapolations(ParallelPlan(pp=2, tp=8, dp=8)))
    assert "gpus 128" in text and "pp 2" in text and "tp 8" in text
    assert calibration.cluster.calibrated_gpus == 16


@pytest.mark.parametrize(
    "runs", [[], [MeasuredRun(MODEL, PLANS[0], 0.0)], predict_runs(PRESET) * 7]
)
def test_invalid_runs_are_refused(runs: list[MeasuredRun]) -> None:
    with pytest.raises(UsageError):
        planner.calibrate(PRESET, STACK, runs)


CSV = "pp,tp,dp,microbatches,sequence_parallel,{}\n1,1,8,32,0,{}\n# a comment\n1,4,2,128,1,{}\n"
SIZES = {"layers": 16, "hidden": 2048, "heads": 32, "vocab": 131072, "sequence": 4096, "ffn": 8192}
MODEL_OPTIONS = [*(word for k, v in SIZES.items() for word in (f"--{k}", str(v))), "--gated"]


def run_calibrate_command(tmp_path: Path, text: str, *options: str) -> int:
    (tmp_path / "runs.csv").write_text(text)
    return main([
        "plan", *MODEL_OPTIONS, "--cluster", "h100", "--calibrate", str(tmp_path / "runs.csv"),
        "-o", str(tmp_path / "mine.toml"), *(options or ("--stack", "nanotron")),
    ])  # fmt: skip


def test_command_writes_usable_cluster_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not run_calibrate_command(
        tmp_path, CSV.format("step_time,memory", "3.36,24.2GB", "9.1,")
    )
    output = capsys.readouterr().out
    assert "kernel_us" in output and "24.2 GB" in output and "measure next: pp" in output
    cluster = load_cluster(tmp_path / "mine.toml")
    assert cluster.calibrated_gpus == 8 and 0 < cluster.uncertainty < 0.2
    by_tokens = CSV.format("tokens_per_second", 256 * 4096 / 3.36, 256 * 4096 / 9.1)
    assert not run_calibrate_command(tmp_path, by_tokens)
    second_cluster = load_cluster(tmp_path / "mine.toml")
    assert second_cluster == cluster
    capsys.readouterr()
    assert not main([
        "plan", *MODEL_OPTIONS, "--cluster", str(tmp_path / "mine.toml"), "--nodes", "2",
        "--batch", "256", "--stack", "nanotron", "--closed-form-only", "--zero", "1",
    ])  # fmt: skip
    output = capsys.readouterr().out
    assert "as for the calibrated runs" in output and "may be equally fast" in output
    assert "--calibrate" not in output
    assert "16 GPUs are an extrapolation" in output
    for counts, is_extrapolated in (("4,8", False), ("8,16", True)):
        assert not main([
            "plan", *MODEL_OPTIONS, "--cluster", str(tmp_path / "mine.toml"), "--batch", "256",
            "--stack", "nanotron", "--closed-form-only", "--zero", "1", "--gpu-counts", counts,
        ])  # fmt: skip
        output = capsys.readouterr().out
        assert ("note: 16 GPUs are an extrapolation" in output) == is_extrapolated


@pytest.mark.parametrize(
    "text",
    [
        "", "pp,tp\n1,1\n", CSV.format("seconds", 1, 1), CSV.format("step_time", "x", 1),
        CSV.format("step_time", "1,2", 1), CSV.format("step_time", 1, -1),
        "pp,dp,step_time\nx,8,1\n", "pp,dp,step_time\n0,8,1\n", "dp,tokens_per_second\n8,0\n",
        "dp,sequence_parallel,step_time\n8,perhaps,1\n", "dp,schedule,step_time\n8,none,1\n",
    ],
)  # fmt: skip
def test_invalid_files_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(SchedirError):
        from schedir.commands.common.cluster_calibration import read_runs

        (tmp_path / "runs.csv").write_text(text)
        runs = read_runs(tmp_path / "runs.csv", MODEL)
        planner.calibrate(PRESET, STACK, runs)


@pytest.mark.parametrize(
    ("header", "hint"),
    [
        ("step_time_ms", "divide the milliseconds by 1000, and name the column step_time"),
        ("iteration_time", "did you mean step_time?"),
        ("throughput", "did you mean tokens_per_second?"),
        ("tp_size,step_time", "did you mean tp?"),
        ("pp;dp;step_time", "separate the columns by commas, not by ';': pp,tp,dp"),
    ],
)
def test_unknown_column_gets_hint(tmp_path: Path, header: str, hint: str) -> None:
    from schedir.commands.common.cluster_calibration import read_runs

    (tmp_path / "runs.csv").write_text(f"{header}\n")
    with pytest.raises(ConfigError, match=r"unknown column .* step_time \(in seconds\)") as caught:
        read_runs(tmp_path / "runs.csv", MODEL)
    assert caught.value.hint.startswith(hint)


@pytest.mark.parametrize("factor", [1000, 1 / 1000], ids=["milliseconds", "kiloseconds"])
def test_step_times_in_another_unit_are_refused(factor: float) -> None:
    runs = [run._replace(step_time=run.step_time * factor) for run in predict_runs(PRESET)]
    with pytest.raises(
        UsageError, match=r"run 1: step_time is .* s, but the prediction is"
    ) as caught:
        planner.calibrate(PRESET, STACK, runs)
    assert caught.value.hint.startswith("give step_time in seconds")


@pytest.mark.parametrize("memory", [70.0, 6e13, 0.0], ids=["gigabytes", "too large", "zero"])
def test_memory_in_another_unit_is_refused(memory: float) -> None:
    runs = [run._replace(memory=memory) for run in predict_runs(PRESET)]
    with pytest.raises(UsageError, match=r"run 1: memory is .*, but the prediction is") as caught:
        planner.calibrate(PRESET, STACK, runs)
    assert caught.value.fields == ("memory",)


@pytest.mark.parametrize(("text", "fact"), [
    ("pp,tp,pp,step_time\n2,2,1,6\n", "column pp is repeated"),
    ("pp,step_time,tokens_per_second\n2,6,5000\n", "either step_time or tokens_per_second"),
    ("pp,step_time,tokens_per_second\n2,,\n", "either step_time or tokens_per_second"),
    ("pp,step_time,memory\n2,6,-5\n", "memory must be bytes, such as 7e10 or 70GB, not '-5'"),
    ("pp,step_time\n2.0,6\n", "pp must be an integer, not '2.0'"),
    ("sequence_parallel,step_time\nyes,6\n", "sequence_parallel must be true or false"),
    ("layers_per_stage,step_time\n(12 12),6\n", "layers_per_stage must be integers with spaces"),
])  # fmt: skip
def test_invalid_lines_are_refused(text: str, fact: str, tmp_path: Path) -> None:
    from schedir.commands.common.cluster_calibration import read_runs

    (tmp_path / "runs.csv").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_runs(tmp_path / "runs.csv", MODEL)
    assert fact in caught.value.fact


def test_csv_error_has_its_line(tmp_path: Path) -> None:
    from schedir.commands.common.cluster_calibration import read_runs

    (tmp_path / "runs.csv").write_text(CSV.format("step_time", 1, "x"))
    with pytest.raises(ConfigError) as caught:
        read_runs(tmp_path / "runs.csv", MODEL)
    assert caught.value.line == 4


def test_command_needs_stack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_calibrate_command(tmp_path, CSV.format("step_time", 1, 1), "--nodes", "1")
    assert "--stack" in capsys.readouterr().err


# ------------------------------------------------------------ runs that do not fit

REPEATED_PLANS = st.lists(
    st.tuples(st.sampled_from(range(3)), st.floats(0.7, 1.4)), min_size=1, max_size=3,
    unique_by=lambda pair: pair[0],
)  # fmt: skip


def build_runs(factors: list[tuple[int, float]]) -> list[MeasuredRun]:
    """Return a run for each pair of a plan's number and the measured share of the prediction."""
    runs = predict_runs(PRESET)
    return [runs[k]._replace(step_time=runs[k].step_time * factor) for k, factor in factors]


def get_log_widths(calibration: planner.Calibration) -> list[float]:
    return [math.log(constant.high / constant.low) for constant in calibration.constants]


@given(st.sampled_from(range(3)), st.floats(0.85, 1.2), st.integers(2, 6))
@settings(max_examples=8)
def test_repeated_runs_narrow_intervals_only_by_their_noise(
    k: int, factor: float, copies: int
) -> None:
    """Equal runs move a fit towards them. The shared error of a plan limits how much they tell.

    The error of a plan is 3 % and the noise of a run 4 %. So six runs have 0.68 of the error of
    one. With several plans, a fit may overlap other messages with compute. Then intervals change
    more.
    """
    runs = build_runs([(k, factor)])
    once, repeated = (planner.calibrate(PRESET, STACK, runs * n) for n in (1, copies))
    ratios = np.sqrt(np.diag(repeated.covariance) / np.diag(once.covariance))
    assert ratios.min() >= 0.65 and ratios.max() <= 1.01
    assert abs(math.log1p(repeated.errors[0])) <= abs(math.log1p(once.errors[0])) + 1e-9
    for a, b in zip(once.constants, repeated.constants, strict=True):
        assert abs(math.log(a.value / b.value)) <= 0.03


@given(REPEATED_PLANS, st.randoms(use_true_random=False))
@settings(max_examples=5)
def test_order_of_repeated_runs_changes_nothing(
    factors: list[tuple[int, float]], random: Random
) -> None:
    runs = build_runs(factors) * 2
    shuffled = [*runs]
    random.shuffle(shuffled)
    a, b = (planner.calibrate(PRESET, STACK, order) for order in (runs, shuffled))
    assert get_log_widths(a) == pytest.approx(get_log_widths(b), rel=1e-6)
    assert a.residual == pytest.approx(b.residual, abs=1e-9)


@given(st.floats(1.6, 6.0), st.sampled_from(range(3)))
@settings(max_examples=8)
def test_contradictory_runs_warn_and_widen_intervals(ratio: float, k: int) -> None:
    """Two runs of one plan differ by a factor. The interval includes both."""
    runs = build_runs([(k, ratio**-0.5), (k, ratio**0.5)])
    calibration = planner.calibrate(PRESET, STACK, runs)
    assert [text.split(":")[0] for text in calibration.list_misfits()] == ["run 1", "run 2"]
    low, high = calibration.find_interval(MODEL, PLANS[k])
    assert low <= runs[0].step_time * 1.01 and high >= runs[1].step_time / 1.01
    spread = math.exp(INTERVAL_QUANTILE * calibration.cluster.uncertainty)
    assert spread >= 0.97 * ratio**0.5


@pytest.mark.parametrize("copies", [1, 20])
def test_run_far_from_prior_is_reported(copies: int) -> None:
    """A step of twice the predicted time needs a speed that the prior excludes."""
    runs = build_runs([(0, 2.0)]) * copies
    calibration = planner.calibrate(PRESET, STACK, runs)
    assert len(calibration.list_misfits()) == copies
    assert calibration.residual > 0.2
    low, high = calibration.find_interval(MODEL, PLANS[0])
    assert low <= runs[0].step_time <= high * 1.001
    speed = calibration.constants[0]
    assert speed.name == "flops" and speed.high / speed.low > 1.4


def test_runs_that_fit_are_not_reported() -> None:
    calibration = planner.calibrate(PRESET, STACK, build_runs([(0, 1.04), (1, 0.97), (2, 1.0)]))
    assert calibration.list_misfits() == [] and calibration.residual < 0.08


def test_command_warns_of_misfits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not run_calibrate_command(tmp_path, CSV.format("step_time", 8.0, 9.1))
    output = capsys.readouterr().out
    assert "warning: the fitted constants do not reproduce 1 of 2 runs:\n  run 1: " in output
    assert "# warning: the fitted constants do not" in (tmp_path / "mine.toml").read_text()
    assert not run_calibrate_command(tmp_path, CSV.format("step_time", 3.36, 9.1))
    assert "do not reproduce" not in capsys.readouterr().out
