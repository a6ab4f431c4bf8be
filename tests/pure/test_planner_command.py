"""Tests of `schedir plan`: its output, its pictures, the files it writes, and its errors."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from schedir import from_text
from schedir.commands.common.plan_report import format_plans
from schedir.commands.common.plan_request import PlanRequest
from schedir.errors import UsageError
from schedir.planner import GpuMemory, PlanEstimate, StepBreakdown, cluster_preset
from schedir.planner.bottleneck import attach_bottleneck
from schedir.planner.hardware.cluster_size import resize_cluster
from schedir.planner.transformer.model_presets import MODEL_PRESETS, load_model
from tests.cases import ALL
from tests.commands import run_command, run_refused_command
from tests.tutorial import read_blocks

GOLDEN = Path(__file__).parents[1] / "golden" / "plan.txt"
TINY = ("--layers=8", "--hidden=256", "--heads=8", "--vocab=256", "--sequence=128")
AT = ("plan", *TINY, "--cluster=a100", "--gpus=4", "--batch=32", "--closed-form-only")
PARTS = StepBreakdown(20, 4, 2, 1, 5, 0.5, 0.25)
PLAN = PlanEstimate(
    pp=8, tp=8, dp=16, microbatches=96, stages_per_rank=2, schedule="interleaved",
    recompute="selective", zero=1,
    step_time=sum(PARTS), breakdown=PARTS, memory=GpuMemory(5e9, 6e9, 7e9, 20e9, 3e9),
    flops_per_second=150e12,
    mfu=0.48,
    bottleneck="memory",
    explanation="memory: a faster plan needs 4.1 GB more than a GPU has. Its step takes 31.2 s",
)  # fmt: skip


def test_plans_print_as_golden_file() -> None:
    """Compare the complete output for two plans with the golden file."""
    names = ("gpt-175b", "a100")
    request = PlanRequest(
        MODEL_PRESETS["gpt-175b"][0], cluster_preset("a100", 128), 1536, names, {}, "megatron"
    )
    uneven = replace(PLAN, layers_per_stage=(5, *[6] * 14, 7), tp=16, dp=8, sequence_parallel=True)
    plain = replace(
        PLAN, schedule="one_f_one_b", stages_per_rank=1, step_time=40.0, zero=0, recompute="none"
    )
    plain = replace(
        plain, is_simulated=True, explanation="", breakdown=StepBreakdown(0.04, 0, 0, 0, 0, 0, 0)
    )
    text = format_plans(request, [uneven, plain], 1, 300e9)
    text += format_plans(replace(request, stack=""), [plain], 1, None)
    assert text == GOLDEN.read_text()


def test_counts_of_one_are_singular() -> None:
    single_gpu = replace(PLAN, pp=1, tp=1, dp=1, microbatches=1)
    request = PlanRequest(
        MODEL_PRESETS["gpt-175b"][0],
        resize_cluster(cluster_preset("a100", 1), 1),
        2,
        ("gpt", "a100"),
        {},
    )
    text = format_plans(request, [single_gpu], 1, None)
    assert "; 1 GPU of a100 " in text and ", 1 microbatch of 1" in text
    long_step = attach_bottleneck(
        request.cluster,
        replace(single_gpu, breakdown=PARTS._replace(host_copies=8658.774), step_time=8669.0),
    )
    assert long_step.explanation == "host_copies: 8659 s of 8669 s"
    assert "bound by host copies: 8659 s" in format_plans(request, [long_step], 1, None)
    slow = replace(single_gpu, flops_per_second=2.553e10)  # a processor
    assert " 0.0255 " in format_plans(request, [slow], 1, None)


def test_printed_numbers_have_readable_units(capsys: pytest.CaptureFixture[str]) -> None:
    """A short training run takes hours or minutes, and small activations are in MB."""
    text = run_command(capsys, *AT, "--top=1", "--pp=4", "--tokens=1e9", "--stack=schedir")
    assert re.search(r"tokens take 244,141 steps: [1-9][\d.]* hours \(90 % of runs: [1-9]", text)
    assert re.search(r"pipeline ranks 0 to 3, by formula: [1-9][\d.]*, .* MB\n", text)
    assert "-o FILE.toml writes this plan for schedir train" in text
    text = run_command(capsys, *AT, "--top=1", "--tokens=1e8")
    assert re.search(r"tokens take 24,414 steps: [1-9][\d.]* minutes ", text)


def test_plan_with_reclaimed_memory_has_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    command = ("plan", "--model=gpt-22b", "--cluster=h100-efa", "--nodes=8", "--batch=256",
               "--stack=nanotron", "--tp=16", "--pp=1", "--top=1", "--zero=0",
               "--recompute=none")  # fmt: skip
    for size, is_full in ((32, True), (2, False)):
        text = run_command(capsys, *command, f"--microbatch-size={size}")
        assert ("fullest GPU 80 GB of 80 GB" in text) == is_full
        assert ("the allocator waits for the GPU" in text) == is_full


def test_model_file_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file gives the model at its top or in [model], with the names of `schedir train`.

    Options given beside the file take precedence.
    """
    monkeypatch.chdir(tmp_path)
    lines = "layers = 8\nhidden = 256\nheads = 8\nvocab = 256\n"
    Path("plain.toml").write_text(f"{lines}sequence = 128\n")
    Path("train.toml").write_text(f"[model]\n{lines}context = 128\ndropout = 0.1\n[data]\n")
    assert load_model("plain.toml") == load_model("train.toml")
    assert load_model("plain.toml", sequence=64).sequence == 64
    Path("wrong.toml").write_text(f"{lines}sequnce = 128\n")
    error = run_refused_command(capsys, "plan", "--model=wrong.toml", *AT[6:])
    assert "wrong.toml: a model has no field 'sequnce'\n  hint: did you mean 'sequence'?" in error


def test_gpus_fill_nodes_or_part_of_one() -> None:
    node = cluster_preset("a100")
    assert resize_cluster(node, 3072).nodes == 384
    assert (resize_cluster(node, 4).nodes, resize_cluster(node, 4).gpus_per_node) == (1, 4)
    with pytest.raises(UsageError):
        resize_cluster(node, 20)


def test_json_output_has_plans(capsys: pytest.CaptureFixture[str]) -> None:
    result = json.loads(run_command(capsys, *AT, "--top=3", "--json"))
    assert result["batch"] == 32 and result["cluster"]["gpus"] == 4
    assert result["model"]["hidden"] == 256
    assert 1 <= len(result["plans"]) <= 3
    for plan in result["plans"]:
        assert plan["pp"] * plan["tp"] * plan["dp"] == 4
        assert plan["dp"] * plan["microbatches"] * plan["microbatch_size"] == 32
        assert sum(plan["breakdown"].values()) == pytest.approx(plan["step_time"])
    steps = [plan["step_time"] for plan in result["plans"]]
    assert steps[1:] == sorted(steps[1:]) and steps[0] <= 1.02 * min(steps)


def test_fixed_options_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    fixed_options = (
        "--pp=2",
        "--tp=1,2",
        "--schedules=gpipe,one_f_one_b",
        "--recompute=full",
        "--zero=1",
    )
    plans = json.loads(run_command(capsys, *AT, *fixed_options, "--json"))["plans"]
    assert plans
    for plan in plans:
        assert plan["pp"] == 2 and plan["tp"] in (1, 2) and plan["zero"] == 1
        assert plan["recompute"] == "full" and plan["schedule"] in ("gpipe", "one_f_one_b")


def test_memory_limit_bounds_plans(capsys: pytest.CaptureFixture[str]) -> None:
    command = ("plan", "--model=llama-7b", "--cluster=a100", "--gpus=8", "--batch=32", "--json",
          "--closed-form-only")  # fmt: skip
    for limit in (40e9, 60e9):
        result = json.loads(run_command(capsys, *command, f"--memory-limit={limit:g}B"))
        used = [plan["memory"]["total"] for plan in result["plans"]]
        assert 0.5 * limit < max(used) <= limit
    error = run_refused_command(capsys, *command, "--memory-limit=90GB")
    assert "--memory-limit 90 GB must be above 0 and at most 80 GB, the memory of a GPU" in error


def test_selected_plan_is_written_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The selected plan is written as a configuration and as a program, and drawn."""
    monkeypatch.chdir(tmp_path)
    plain = (*AT, "--top=4", "--recompute=none,full")
    second_plan = json.loads(run_command(capsys, *plain, "--json"))["plans"][1]
    output = run_command(capsys, *plain, "--select=2", "-o", "best.toml", "--picture", "plans.svg")
    assert output.endswith("wrote best.toml\nwrote plans.svg\n") and "\nplan 2: " in output
    text = Path("best.toml").read_text()
    output_options = ("--select=2", "-o", "best.toml", "--picture", "plans.svg")
    assert text.startswith(
        f"# schedir {shlex.join([*plain, *output_options])}\n# {second_plan['pp']} pipeline rank"
    )
    config = tomllib.loads(text)
    assert config["model"]["hidden"] == 256 and config["model"]["context"] == 128
    assert config["pipeline"]["ranks"] == second_plan["pp"]
    assert config["pipeline"]["tp"] == second_plan["tp"]
    assert config["data"]["microbatch_size"] == second_plan["microbatch_size"]
    run_command(capsys, *plain, "-o", "best.sched", "--picture", "all.png", "--tradeoff")
    program = from_text(Path("best.sched").read_text())
    first_plan = json.loads(run_command(capsys, *plain, "--json"))["plans"][0]
    assert (program.shape.ranks, program.shape.microbatches) == (
        first_plan["pp"],
        first_plan["microbatches"],
    )
    assert {path.suffix for path in tmp_path.iterdir()} == {".toml", ".svg", ".sched", ".png"}


def test_improve_schedules_finds_shorter_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The schedule is written as a program, since a configuration has no name for it."""
    monkeypatch.chdir(tmp_path)
    command = ("plan", "--model=gpt-22b", "--cluster=a100", "--gpus=16", "--batch=32", "--top=1",
          "--pp=4", "--tp=4", "--schedules=one_f_one_b", "--recompute=full")  # fmt: skip
    (plain,) = json.loads(run_command(capsys, *command, "--json"))["plans"]
    (improved,) = json.loads(
        run_command(
            capsys,
            *command,
            "--improve-schedules",
            "--time-limit=0.5",
            "-o",
            "best.sched",
            "--json",
        )
    )["plans"]
    assert improved["schedule"] == "search" and improved["step_time"] < plain["step_time"]
    program = from_text(Path("best.sched").read_text())
    assert program.name == "search" and program.shape.microbatches == improved["microbatches"]
    text = run_command(capsys, *command, "--improve-schedules", "--time-limit=0.5")
    assert "tensor-parallel ranks, search, 32 microbatches of 1" in text
    error = run_refused_command(
        capsys, *command, "--improve-schedules", "--time-limit=0.5", "-o", "best.toml"
    )
    assert "plan 1 has a schedule from --improve-schedules, and a .toml cannot" in error
    assert not Path("best.toml").exists()


def test_optimize_division_shortens_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a large vocabulary the last stage gets fewer layers, also in the written file."""
    command = ("plan", "--layers=24", "--hidden=2304", "--heads=24", "--vocab=128000", "--batch=64",
          "--sequence=2048", "--cluster=a100", "--nodes=1", "--pp=4", "--tp=1", "--top=1",
          "--schedules=one_f_one_b", "--recompute=none", "--json")  # fmt: skip
    (even,) = json.loads(run_command(capsys, *command))["plans"]
    (optimized,) = json.loads(
        run_command(capsys, *command, "--optimize-division", "-o", str(tmp_path / "best.toml"))
    )["plans"]
    layers = optimized["layers_per_stage"]
    assert optimized["step_time"] < 0.85 * even["step_time"]
    assert sum(layers) == 24 and layers[-1] < min(layers[:-1])
    assert f"layers_per_stage = {layers}" in (tmp_path / "best.toml").read_text()


def test_how_to_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run the Python blocks of the page, and the commands whose output it does not show.

    `test_docs` compares the output and the pictures of the others. `test_planner_offload` tests
    plans with offload.
    """
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "plan-a-cluster.md").read_text()
    monkeypatch.chdir(tmp_path)
    for kind, body in read_blocks(page):
        if kind == "python":
            exec(compile(body, "plan-a-cluster.md", "exec"), {})
            assert capsys.readouterr().out
        elif kind == "" and body.startswith("schedir ") and "--picture" not in body:
            for line in body.splitlines():
                if not line.startswith("schedir train") and (ALL or "--offload" not in line):
                    run_command(capsys, *shlex.split(line)[1:])
    assert {path.name for path in tmp_path.iterdir()} == {"best.toml", "best.sched", "best.csv"}


def test_gpu_counts_print_scaling(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The batch is the same for each number, or grows. A number without a plan is explained."""
    picture = tmp_path / "scale.svg"
    command = (
        "plan",
        *TINY,
        "--cluster=a100",
        "--batch=12",
        "--closed-form-only",
        "--tp=1,2",
    )
    counts = "--gpu-counts=8,2,4"
    result = json.loads(run_command(capsys, *command, counts, "--picture", str(picture), "--json"))
    assert [plan["pp"] * plan["tp"] * plan["dp"] for plan in result["strong_scaling"]] == [2, 4, 8]
    assert [
        plan["dp"] * plan["microbatches"] * plan["microbatch_size"]
        for plan in result["strong_scaling"]
    ] == [12, 12, 12]
    assert [
        plan["dp"] * plan["microbatches"] * plan["microbatch_size"]
        for plan in result["weak_scaling"]
    ] == [3, 6, 12]
    assert result["refusals"] == [] and picture.exists()
    table = run_command(capsys, *command, "--gpu-counts=8,2,3")
    assert table.startswith("strong: the same batch\n") and "\nweak: a batch that grows" in table
    assert table.splitlines()[1].split()[:6] == ["GPUs", "batch", "pp", "tp", "dp", "v"]
    assert table.endswith("no plan for 3 GPUs, weak: 4.50 is not a number of sequences\n")
    _, *sentences = table[table.index("\nstep: ") :].splitlines()
    assert sentences and max(map(len, sentences)) <= 110
    error = run_refused_command(capsys, *command[:-1], "--tp=8", "--gpu-counts=2,4")
    assert "8" in error


def test_nanotron_gets_plans_that_it_can_run(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "--model", "gpt-22b", "--cluster", "h100", "--nodes", "4", "--batch", "128"]
    command += ["--stack", "nanotron", "--closed-form-only", "--json"]
    plans = json.loads(run_command(capsys, *command))["plans"]
    assert {plan["schedule"] for plan in plans} <= {"gpipe", "one_f_one_b"}
    assert {plan["recompute"] for plan in plans} <= {"none", "full"}
    assert all(plan["zero"] < 2 and plan["stages_per_rank"] == 1 for plan in plans)
    plans = json.loads(run_command(capsys, *command, "--schedules", "interleaved"))["plans"]
    assert {plan["schedule"] for plan in plans} == {"interleaved"}
