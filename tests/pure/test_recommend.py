"""`schedir recommend`, and the page of which schedule is the shortest, which uses its output."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest

import schedir
from docs import which_schedule
from schedir import Costs, PipelineShape, Sizes, Timeline
from schedir.__main__ import main
from schedir.commands.common import schedule_ranking
from schedir.compiler.compile import compile
from schedir.errors import MemoryLimitError, SchedirError
from schedir.ir.isa.instructions import BACKWARD_INPUT
from schedir.schedules import get_built_in_schedules
from schedir.schedules.schedule_algebra import get_placement_mark, get_weight_delay_mark, has_free_v
from tests.cases import ALL, cases
from tests.commands import run_command, run_refused_command
from tests.laws import find_min_microbatches

DOCS = Path(__file__).parents[2] / "docs"
COSTS_OPTION = "--costs=F=1,B=2,send=0.05"


def simulate_schedule(name: str, v: int, P: int, m: int, send: float) -> Timeline:
    """Simulate a schedule with v stages per rank, which together have F = I = W = 1."""
    schedule = get_built_in_schedules()[name]
    shape = PipelineShape(P, m, v, get_placement_mark(schedule)[0] or "loop")
    cost_share = P / shape.stages
    costs = Costs(F=cost_share, I=cost_share, W=cost_share, B=2 * cost_share, send=send)
    return schedir.simulate(
        compile(schedule, shape, progress_model="per_edge", costs=costs),
        costs,
        progress_model="per_edge",
    )


def run_recommend(capsys: pytest.CaptureFixture[str], *argv: str) -> list[dict[str, Any]]:
    code = main(["recommend", *argv, "--json"])
    result_rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    assert code == (0 if result_rows else 2)
    return result_rows


@pytest.mark.parametrize(("P", "m"), cases([(3, 5), (2, 1)], [(4, 8), (4, 3), (3, 7)]))
def test_all_schedules_are_ranked(capsys: pytest.CaptureFixture[str], P: int, m: int) -> None:
    """The output has each schedule that compiles and trains once, the shortest first."""
    shape = (f"--ranks={P}", f"--microbatches={m}", "--progress-model=per_edge", COSTS_OPTION)
    result_rows = run_recommend(capsys, *shape)
    keys = [(float(f"{row['span']:.9g}"), row["peak_activations"]) for row in result_rows]
    assert keys == sorted(keys)
    expected: dict[str, Timeline] = {}
    for name, schedule in get_built_in_schedules().items():
        fixed_v = get_placement_mark(schedule)[1]
        for v in (fixed_v,) if fixed_v else (1, 2, 4) if has_free_v(schedule) else (1,):
            if get_weight_delay_mark(schedule) is None:
                try:
                    run = simulate_schedule(name, v, P, m, 0.05)
                except SchedirError:
                    continue
                if run.program.has_backward:
                    expected[run.program.digest] = run
    assert {row["digest"] for row in result_rows} == {*expected}
    assert len(result_rows) == len(expected)
    for row in result_rows:
        run, program = expected[row["digest"]], expected[row["digest"]].program
        assert row["span"] == pytest.approx(run.span)
        assert row["peak_activations"] == run.peak_activations
        assert row["has_split_backward"] == (BACKWARD_INPUT in program.used_opcodes)
        assert row["parameter_copies"] == program.shape.placement_rows
    filtered = run_recommend(capsys, *shape, "--no-split-backward", "--max-activations=2.5")
    assert filtered == [
        row
        for row in result_rows
        if not row["has_split_backward"] and row["peak_activations"] <= 2.5
    ]
    main(["recommend", *shape, "--no-split-backward", "--max-activations=2.5"])
    text = capsys.readouterr().out
    rows_over_limit = [
        r for r in result_rows if r["peak_activations"] > 2.5 and not r["has_split_backward"]
    ]
    assert ("over the limit of 2.5 activations: " in text) == bool(rows_over_limit)
    assert ("refused zb_v" in text or ", zb_v:" in text) == (m < 2 * P - 1)


def test_memory_limit_agrees_with_compile(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, limit = Sizes(activation=16e6, saved=1e9, model_states=8e9), 11.5e9
    options = (
        "--sizes=activation=16MB,saved=1GB,model_states=8GB",
        "--memory-limit=11.5GB",
        "--ranks=3",
        "--microbatches=4",
    )
    names = {
        row["program"] for row in run_recommend(capsys, *options) if row["stages_per_rank"] == 1
    }
    for name, schedule in get_built_in_schedules().items():
        if not has_free_v(schedule) and get_placement_mark(schedule) == (None, None):
            try:
                compile(schedule, PipelineShape(3, 4), sizes=sizes, memory_limit=limit)
            except MemoryLimitError:
                assert name not in names
            else:
                assert (
                    name in names
                    or name == "forward_only"
                    or get_weight_delay_mark(schedule) is not None
                )
    assert names
    shape = ["--ranks=2", "--microbatches=4"]
    # The last remedy has the options of all others.
    monkeypatch.setattr(schedule_ranking, "_REMEDIES", schedule_ranking._REMEDIES[-1:])
    assert main(["recommend", *shape, "--sizes=saved=1GB", "--memory-limit=1MB"]) == 2
    output = capsys.readouterr().out
    assert output.splitlines()[0].startswith("2 ranks, 4 microbatches; ")
    assert "\nno schedule fits with these options\nover the limit of 1 MB: " in output
    assert "wave x 4 (" in output and "wave x 1" not in output  # a vee has two at least
    assert "forward_only" not in output and "but fits with" not in output


def test_options_that_make_schedule_fit_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--sizes=saved=3.83GB,model_states=16.6GB,activation=67.2MB", "--memory-limit=40GB"]
    shape = ["--ranks=4", "--microbatches=8"]
    lines = run_command(capsys, "recommend", *shape, *sizes).splitlines()
    options_by_schedule, spans = dict[str, str](), dict[str, float]()
    for line in lines:
        if line.startswith("over the limit"):
            head, _, names = line.partition(": ")
            options = head.partition("but fits with ")[2].partition(" (")[0]
            for name, amounts in re.findall(r"(\w[\w ]+) \((.*?)\)", names):
                options_by_schedule[name] = options
                if options:
                    spans[name] = float(amounts.removeprefix("span ").split(",")[0])
    assert options_by_schedule["zb_h2"] == ""
    assert options_by_schedule["interleaved x 2"] == "-O buffer_sharing=minimal"
    assert options_by_schedule["gpipe"] == "-O recompute=fit"
    every = {*options_by_schedule.values()} - {""}
    for options in every if ALL else ["-O buffer_sharing=minimal"]:
        result_rows = run_recommend(capsys, *shape, *sizes, *options.split())
        fitting = {(row["program"], row["stages_per_rank"]) for row in result_rows}
        for name in (
            name
            for name, needed in options_by_schedule.items()
            if needed == options and " x " in name
        ):
            program, v = name.split(" x ")
            assert (program, int(v)) in fitting or program.startswith("looped")  # looped x 1: gpipe
        found_spans = {
            f"{row['program']} x {row['stages_per_rank']}": row["span"] for row in result_rows
        }
        for name in found_spans.keys() & {
            n for n, fit_options in options_by_schedule.items() if fit_options == options
        }:
            assert spans[name] == float(f"{found_spans[name]:.6g}")


def test_compare_marks_schedules_over_limit(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--sizes=saved=3.83GB,model_states=16.6GB,activation=16.8MB", "--memory-limit=40GB"]
    command = ["compare", "gpipe", "one_f_one_b", "zb_h2", *sizes]
    over_limit, fits, _ = json.loads(run_command(capsys, *command, "--json"))
    assert over_limit["is_over_limit"] and over_limit["peak_memory"] > 40e9
    assert fits["peak_memory"] < 40e9 and not fits["is_over_limit"]
    text = run_command(capsys, *command)
    assert "over the limit: " in text and "peak memory" in text
    assert "but fits with -O recompute=fit (activations are computed again): gpipe (span " in text
    unlimited = json.loads(run_command(capsys, *command[:-1], "--json"))
    assert unlimited[0]["peak_memory"] == over_limit["peak_memory"]
    # What no recomputation makes fit has no row, unless nothing else is left.
    tight = ["--sizes=saved=1GB,model_states=8GB", "--memory-limit=9GB", "-O", "recompute=fit"]
    text = run_command(capsys, "compare", "one_f_one_b", "dualpipe", *tight)
    assert "\n dualpipe " not in text and "over the limit of 9 GB: dualpipe (" in text
    run_refused_command(capsys, "compare", "dualpipe", *tight)


def test_missing_model_states_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--sizes has no grads and no optimizer, and a missing size counts as 0 bytes"
    shape = ("--ranks=2", "--microbatches=2")
    for command in (["recommend"], ["compare", "gpipe"], ["simulate", "gpipe"]):
        assert line in run_command(capsys, *command, *shape, "--sizes=saved=1GB,params=2GB")
    for sizes in ("params=1GB,grads=1GB,optimizer=6GB", "model_states=8GB", "saved=1GB"):
        assert line not in run_command(capsys, "simulate", "gpipe", *shape, f"--sizes={sizes}")
    assert line not in run_command(capsys, "simulate", "forward_only", "--sizes=params=2GB")


def test_user_schedule_is_ranked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "from schedir import B, F\n\n\ndef slow(rank, ranks, m):\n    return m * F + m * B\n"
    )
    output = run_command(capsys, "recommend", f"{file}:slow", "--ranks=2", "--microbatches=4")
    assert f"{file}:slow is the same program as gpipe\n" in output
    assert not re.search(r"^ *slow ", output, re.M)
    file.write_text(
        "from schedir import B, F\n\n\ndef slow(rank, ranks, m):\n    return m * (F + B)\n"
    )
    result_rows = run_recommend(capsys, f"{file}:slow", "--ranks=2", "--microbatches=4")
    assert result_rows[-1]["program"] == "slow"
    file.write_text(
        "from schedir import B, F\n\n\ndef looped(rank, ranks, m, v):\n"
        "    for j in range(v):\n        yield m * F[j]\n"
        "    for _ in range(m):\n        for j in reversed(range(v)):\n            yield B[j]\n"
    )
    output = run_command(capsys, "recommend", f"{file}:looped", "--ranks=2", "--microbatches=4")
    assert f"{file}:looped x 1 is the same program as gpipe\n" in output
    assert sorted(re.findall(r"^ *looped +(\d)", output, re.M)) == ["2", "4"]


def test_run_gives_shape_and_mean_times(capsys: pytest.CaptureFixture[str]) -> None:
    run = str(DOCS.parent / "examples" / "traced.timeline")
    row_by_schedule = {
        (row["program"], row["stages_per_rank"]): row for row in run_recommend(capsys, run)
    }
    assert {row["unit"] for row in row_by_schedule.values()} == {"s"}
    compared = json.loads(run_command(capsys, "compare", run, "gpipe", "one_f_one_b", "--json"))
    assert len(compared) == 3
    for row in compared:
        assert row_by_schedule[row["program"], row["stages_per_rank"]]["span"] == row["span"]


def test_run_gives_progress_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Use the progress model of a run. Under the default model, interleaved would take longer."""
    run, costs = str(tmp_path / "run.timeline"), "F=1,B=2,send=0.9"
    options = ["--costs", costs, "--progress-model", "per_edge"]
    run_command(capsys, "simulate", "gpipe", *options, "-o", run)
    expected = json.loads(run_command(capsys, "compare", "interleaved", *options, "--json"))
    (_, compared) = json.loads(run_command(capsys, "compare", run, "interleaved", "--json"))
    assert compared["span"] == pytest.approx(expected[0]["span"])
    ranked = {(row["program"], row["stages_per_rank"]): row for row in run_recommend(capsys, run)}
    assert ranked["interleaved", 2]["span"] == pytest.approx(compared["span"])


def test_equal_schedule_names_are_distinguished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A user's function may have the name of a built-in schedule."""
    file = tmp_path / "own.py"
    file.write_text(
        "def gpipe(rank, ranks, m):\n    return m * (F + B)\n\nfrom schedir import B, F\n"
    )
    for command in (["compare", f"{file}:gpipe", "gpipe"], ["recommend", f"{file}:gpipe"]):
        names = [line.split()[0] for line in run_command(capsys, *command).splitlines()[2:]]
        assert f"{file}:gpipe" in names and "gpipe" in names


def test_stage_costs_are_spread_over_stages(capsys: pytest.CaptureFixture[str]) -> None:
    """Costs of four stages are spread over the 8 or 16 stages of other schedules."""
    shape = ("--ranks=4", "--microbatches=4", "--progress-model=per_edge")
    by_rank = run_recommend(capsys, *shape, "--costs=F=1,B=2,send=0.1")
    assert by_rank == run_recommend(capsys, *shape, "--costs=F=1:1:1:1,B=2:2:2:2,send=0.1")
    uneven = run_recommend(capsys, *shape, "--costs=F=1:1:1:2,B=2:2:2:4")
    (row,) = (r for r in uneven if r["program"] == "interleaved" and r["stages_per_rank"] == 2)
    costs = Costs(F=(0.5,) * 6 + (1, 1), B=(1,) * 6 + (2, 2))
    program = compile(
        get_built_in_schedules()["interleaved"],
        PipelineShape(4, 4, 2),
        progress_model="per_edge",
        costs=costs,
    )
    assert row["span"] == schedir.simulate(program, costs, progress_model="per_edge").span


# ---------------------------------------------------------------- the page


def test_documented_cells_match_simulation() -> None:
    """Simulate a sample of the rows of the file again with `simulate_schedule`."""
    with (DOCS / "results" / "which-schedule.csv").open(newline="") as file:
        cells = list(csv.DictReader(file))
    for cell in cells[:: len(cells) // (60 if ALL else 20)]:
        name, P, m = cell["name"], int(cell["P"]), int(cell["m"])
        run = simulate_schedule(name, int(cell["v"]), P, m, float(cell["send"]))
        assert float(cell["span"]) == pytest.approx(run.span), "python docs/which_schedule.py"
        assert float(cell["memory"]) == run.peak_activations
        assert 1 - which_schedule.WORK * m / run.span == pytest.approx(run.bubble)


@pytest.mark.parametrize("at", [(2, 1, 0.2), (4, 8, 0.05), (8, 13, 0.05)])
def test_documented_file_matches_command(at: tuple[int, int, float]) -> None:
    assert list(which_schedule.run_recommend(*at)) == which_schedule.read_cells()[at], (
        "python docs/which_schedule.py"
    )


def test_documented_file_has_every_size() -> None:
    assert {(P, m) for P, m, _ in which_schedule.read_cells()} >= {
        (P, int(P * k)) for P in (2, 4, 8, 16) for k in (0.5, 1, 2, 4, 8)
    }


@pytest.mark.parametrize("rule", which_schedule.RULES, ids=lambda rule: rule.text[:30])
def test_documented_rules_hold_in_all_cells(rule: which_schedule.Rule) -> None:
    sizes_asked = [size for size in which_schedule.list_table_cells() if rule.where(size)]
    assert len(sizes_asked) >= 10 and all(rule.holds(size) for size in sizes_asked)


def test_page_has_min_microbatches() -> None:
    """`test_zoo` tests that schedules support any number of microbatches from the minimum on."""
    fill = {"zb_v": 7, "dualpipe_v": 8, "dualpipe": 8, "chimera": 2, "bitpipe": 2}
    page = (DOCS / "how-to" / "choose-a-schedule.md").read_text()
    sentence = (
        "`zb_v` needs 2P-1 microbatches, `dualpipe_v` 2P, `dualpipe` an even number of at least "
        "2P, `chimera` and `bitpipe` 2."
    )
    assert sentence in " ".join(page.split())
    for name, schedule in get_built_in_schedules().items():
        assert find_min_microbatches(schedule, 4) == fill.get(name, 1)
