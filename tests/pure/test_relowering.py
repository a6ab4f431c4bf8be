"""Tests of new transfers for the same compute: the claims of `explain`, and `--relower`."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import schedir
from schedir import Costs, PipelineShape, Program, Timeline
from schedir.analysis.dependency_graph import Graph
from schedir.analysis.progress_models import MODELS, ProgressModel
from schedir.commands.common.schedule_options import parse_costs
from schedir.compiler.compile import compile, finish_lowering
from schedir.compiler.relower import extract_compute, infer_options
from schedir.errors import SchedirError
from schedir.io import torch_csv
from schedir.io.source_loader import load_source
from schedir.ir.program import JOINED_BIT, StreamSlices
from schedir.passes.pass_types import BufferSharing
from schedir.predict.calibrate import fill_missing_backwards, format_costs, round_costs
from schedir.predict.what_if import advise
from schedir.schedules import chimera, dualpipe_v, gpipe, interleaved, one_f_one_b, zb_v
from schedir.schedules.schedule_algebra import Schedule
from schedir.testing import programs
from schedir.verify.check import check
from tests.cases import cases, each_value
from tests.commands import run_command, run_refused_command
from tests.strategies import costs as any_costs

GOLDEN = Path(__file__).parents[1] / "golden"
COSTS = Costs(F=1, B=2, send=0.1)
AT = "--costs=F=1,B=2,send=0.1"


def import_torch_program() -> Program:
    """Return Interleaved1F1B of 4 ranks, 8 stages and 8 microbatches, as torch 2.13 lowers it."""
    text = (GOLDEN / "torch_interleaved_1f1b.csv").read_text()
    return finish_lowering(torch_csv.from_csv(text, "torch_interleaved_1f1b"))


def load_program(path: str) -> Program:
    program = load_source(path)
    assert isinstance(program, Program)
    return program


@pytest.fixture
def torch_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Path:
    """Change to a temporary folder with torch's program in it, and return the folder."""
    monkeypatch.chdir(tmp_path)
    run_command(capsys, "import", str(GOLDEN / "torch_interleaved_1f1b.csv"), "-o", "theirs.sched")
    return tmp_path


def test_explain_torch_interleaved_1f1b(
    torch_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = run_command(capsys, "explain", "theirs.sched", AT)
    assert text == (GOLDEN / "explain_transfers.txt").read_text()
    assert text in (GOLDEN.parents[1] / "docs" / "how-to" / "speed-up-a-run.md").read_text()


def parse_command(line: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the arguments of a `schedir` command from `explain`, as a shell expands them."""
    inner = re.search(r'"\$\(schedir (.*)\)"', line)
    costs = run_command(capsys, *shlex.split(inner[1])).strip() if inner else ""
    return shlex.split(line.replace(inner[0], costs) if inner else line)[1:]


def test_explained_commands_give_claimed_span(
    torch_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For programs and progress models, each command of `explain` gives the span it claims."""
    odd = compile(zb_v, PipelineShape(4, 8, 2, "vee"), costs=Costs(F=1, I=3, W=0.1))
    orders = set()
    programs_and_models: list[tuple[Program, ProgressModel]] = cases(
        [(import_torch_program(), "blocking_serial"), (odd, "per_device")],
        [(import_torch_program(), "per_device")],
    )
    for program, model in programs_and_models:
        Path("theirs.sched").write_text(schedir.to_text(program))
        run = schedir.simulate(program, COSTS, progress_model=model)
        seconds = replace(run, kind="measured", unit="s")
        schedir.save_timeline(seconds, f"{model}.timeline")
        for argv in (["theirs.sched", AT, f"--progress-model={model}"], [f"{model}.timeline"]):
            lines = run_command(capsys, "explain", *argv).splitlines()
            claims = [k for k, line in enumerate(lines) if "the same compute" in line]
            assert claims
            for index in claims:
                match = re.search(r": span ([\d.]+)( s)?, bubble", lines[index])
                assert match and (match[2] is None) == (len(argv) > 1)
                command = parse_command(lines[index + 1], capsys)
                assert command[:1] == ["print"]
                orders.add("--costs" in command)
                run_command(capsys, *command)
                output = run_command(
                    capsys, "simulate", "other.sched", AT, f"--progress-model={model}", "--json"
                )
                assert json.loads(output)["span"] == pytest.approx(float(match[1]), rel=1e-3)
                if "grouped" in lines[index]:
                    assert "torch" not in lines[index + 2]
                    continue
                command = shlex.split(
                    lines[index + 2].partition("schedir ")[2].partition(", and")[0]
                )
                run_command(capsys, *command)
                printed, imported = (
                    load_program("other.sched"),
                    torch_csv.from_csv(Path("other.csv").read_text()),
                )
                assert finish_lowering(imported).streams == printed.streams
                assert extract_compute(printed).streams == extract_compute(program).streams
    assert orders == {False, True}


def shuffle_transfers(program: Program, seed: int) -> Program:
    """For an even seed, issue the instructions alone, in a random order that ends in `per_edge`."""
    if seed % 2:
        return program
    program = replace(
        program, streams=StreamSlices.from_words(program.words & ~JOINED_BIT, program.offsets)
    )
    graph = Graph.from_program(program, "per_edge")
    order_of_node = {node: k for k, node in enumerate(graph.random_topological_order(seed))}
    turns = np.array([order_of_node[node] for node in graph.node.tolist()])
    order = np.lexsort((turns, graph.index.rank))
    return check(
        replace(program, streams=StreamSlices.from_words(program.words[order], program.offsets)),
        "per_edge",
    )


@given(programs(), st.data(), st.sampled_from(MODELS), st.booleans(), st.integers(0, 2**32 - 1))
def test_transfer_advice_equals_simulation(
    program: Program,
    data: st.DataObject,
    progress_model: ProgressModel,
    blocking_hosts: bool,
    seed: int,
) -> None:
    """For any order of the transfers, a change keeps the compute and gives the claimed time."""
    costs = data.draw(any_costs(program.shape))
    program = shuffle_transfers(program, seed)
    try:
        run = schedir.simulate(
            program, costs, progress_model=progress_model, blocking_hosts=blocking_hosts
        )
    except SchedirError:  # does not run under this model
        assume(False)
    advice = advise(run, costs)
    costs = fill_missing_backwards(costs, program)
    for change in advice.changes:
        row = change.row
        if row.progress_model is not None:
            assert row.progress_model == "per_edge" != progress_model
            assert change.saved_share >= -1e-9
            span = schedir.simulate(
                program, costs, progress_model="per_edge", blocking_hosts=blocking_hosts
            ).span
        elif row.kind in ("transfers", "grouped"):
            relowered, overlap = change.run.program, row.kind == "grouped"
            assert extract_compute(relowered).streams == extract_compute(program).streams
            check(relowered, progress_model, blocking_hosts=blocking_hosts)
            options = infer_options(program, progress_model) | {"overlap": overlap}
            same = compile(
                extract_compute(program),
                progress_model=progress_model,
                costs=row.transfer_costs,
                **options,
            )
            assert same.digest == relowered.digest
            span = schedir.simulate(
                same, costs, progress_model=progress_model, blocking_hosts=blocking_hosts
            ).span
        else:
            continue
        assert change.saved_share == pytest.approx(1 - span / advice.baseline.span, abs=1e-9)
        assert change.describe().startswith(f"span {span:.4g}, bubble ")


def test_useless_transfer_advice_is_omitted() -> None:
    """Advice is omitted for a program that has these transfers, and for one without messages."""
    run = schedir.simulate(compile(interleaved, PipelineShape(4, 8, 2)))
    alone = schedir.simulate(compile(gpipe, PipelineShape(1, 4)), COSTS)
    for changes in (advise(run).changes, advise(alone, COSTS).changes):
        kinds = ("transfers", "grouped", "queues")
        assert all(change.saved_share <= 1e-9 for change in changes if change.row.kind in kinds)


def test_grouping_advice_only_where_it_helps() -> None:
    def list_advised_kinds(run: Timeline) -> set[str]:
        return {c.row.kind for c in advise(run, COSTS).changes} & {"transfers", "grouped"}

    assert list_advised_kinds(schedir.simulate(import_torch_program(), COSTS)) == {"transfers"}
    program = compile(zb_v, PipelineShape(4, 8, 2, "vee"), costs=COSTS)
    assert list_advised_kinds(
        schedir.simulate(program, COSTS, progress_model="blocking_serial")
    ) == {
        "transfers",
        "grouped",
    }


@pytest.mark.parametrize(
    "options",
    cases(
        ["-O tied_weights -O clip_grad_norm -O dp=2 -O buffer_sharing=latency_preserving"],
        ["", "--placement=vee"],
    ),
)
def test_explain_prints_command_for_schedule(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = ("--costs=send=0.5", "--progress-model=blocking_serial")
    text = run_command(capsys, "explain", "zb_v", *settings, *options.split()).splitlines()
    (line,) = (k for k, text_line in enumerate(text) if "opposite ones grouped" in text_line)
    command = shlex.split(text[line + 1])
    run_command(capsys, *command[1:])
    match = re.search(r"grouped: span ([\d.]+)", text[line])
    span = json.loads(run_command(capsys, "simulate", "other.sched", *settings, "--json"))["span"]
    assert match and span == pytest.approx(float(match[1]), rel=1e-3)
    assert bool(load_program("other.sched").slots) == (
        "buffer_sharing=latency_preserving" in options
    )


@pytest.mark.parametrize(
    "argv",
    cases(
        [
            "interleaved --stages-per-rank=1 -O tp=2",  # the default is two stages per rank
            "mine.sched --relower -O tp=1",  # the file has tp = 2
            "mine.timeline",  # it ran under blocking_serial, and a program file contains no model
        ],
        ["mine.sched --relower -O buffer_sharing=latency_preserving"],
    ),
)
def test_explained_command_keeps_source_options(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    argv: str,
) -> None:
    """The command gives the program of the claim with its shape, its options and its model."""
    monkeypatch.chdir(tmp_path)
    program = compile(interleaved, PipelineShape(4, 8, 2), tp=2)
    Path("mine.sched").write_text(schedir.to_text(program))
    schedir.save_timeline(
        schedir.simulate(import_torch_program(), COSTS, progress_model="blocking_serial"),
        "mine.timeline",
    )
    options = [] if "timeline" in argv else ["--costs=send=1", "--progress-model=blocking_serial"]
    text = run_command(capsys, "explain", *shlex.split(argv), *options).splitlines()
    claims = [k for k, line in enumerate(text) if "the same compute" in line]
    assert claims
    for k in claims:
        command = parse_command(text[k + 1], capsys)
        run_command(capsys, *command)
        assert command[command.index("--progress-model") + 1] == "blocking_serial"
        simulate_options = options or [AT, "--progress-model=blocking_serial"]
        match = re.search(r": span ([\d.]+)", text[k])
        span = json.loads(
            run_command(capsys, "simulate", "other.sched", *simulate_options, "--json")
        )["span"]
        assert match and span == pytest.approx(float(match[1]), rel=1e-3)


def test_printed_costs_are_rounded_and_parse() -> None:
    costs = Costs(F=(1 / 3, 2 / 3), B=(1 / 7, 1 / 7), FB=(1e-9 / 3, 1.0), send=1 / 3)
    assert parse_costs(format_costs(costs)) == replace(round_costs(costs), B=(0.142857, 0.142857))
    assert round_costs(costs).B == 0.142857
    assert round_costs(Costs()) == Costs()


# ---------------------------------------------------------------- --relower


@pytest.mark.parametrize(
    ("schedule", "shape", "buffer_sharing"),
    each_value(
        [
            (one_f_one_b, PipelineShape(4, 8)),
            (zb_v, PipelineShape(2, 5, 2, "vee")),
            (dualpipe_v, PipelineShape(3, 7, 2, "vee")),
            (chimera, PipelineShape(4, 4, 2, "mirror")),
        ],
        [None, "minimal", "latency_preserving"],
    ),
)
def test_relowered_program_is_unchanged(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    schedule: Schedule,
    shape: PipelineShape,
    buffer_sharing: BufferSharing | None,
) -> None:
    """The lowering infers its options from the program, unless they are given."""
    program = compile(
        schedule,
        shape,
        tp=2,
        dp=2,
        clip_grad_norm=True,
        boundary="sharded",
        buffer_sharing=buffer_sharing,
    )
    drafted = replace(schedir.expand_schedule(schedule, shape), tp=2, dp=2, clip_grad_norm=True)
    assert extract_compute(program) == drafted
    original_path, relowered_path = tmp_path / "own.sched", tmp_path / "again.sched"
    original_path.write_text(schedir.to_text(program))
    run_command(capsys, "print", str(original_path), "--relower", "-o", str(relowered_path))
    assert relowered_path.read_text() == original_path.read_text()


def test_program_file_needs_relower_for_options(
    torch_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (
        "-O",
        "overlap",
        "-O",
        "dp=2",
        "-O",
        "clip_grad_norm",
        "-O",
        "buffer_sharing=minimal",
    )
    for option in options:
        run_refused_command(capsys, "print", "theirs.sched", option)
    run_refused_command(capsys, "print", "theirs.sched", "--relower", "--ranks=3")
    run_command(capsys, "print", "theirs.sched", "--relower", *options, "-o", "ours.sched")
    draft = extract_compute(import_torch_program())
    relowered = compile(draft, dp=2, clip_grad_norm=True, overlap=True, buffer_sharing="minimal")
    assert load_source("ours.sched") == replace(relowered, name=draft.name)


def test_import_relowers_torch_csv(torch_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = str(GOLDEN / "torch_interleaved_1f1b.csv")
    run_refused_command(capsys, "import", text, "-O", "overlap", "-o", "ours.sched")
    run_command(capsys, "import", text, "--relower", "-O", "overlap", "-o", "ours.sched")
    assert load_source("ours.sched") == compile(
        extract_compute(import_torch_program()), overlap=True
    )


def test_relowered_run_uses_mean_times(
    torch_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The prediction uses the progress model and the unit of the run."""
    run = schedir.simulate(import_torch_program(), COSTS, progress_model="blocking_serial")
    schedir.save_timeline(replace(run, kind="measured", unit="s"), "x.timeline")
    facts = json.loads(run_command(capsys, "simulate", "x.timeline", "--relower", "--json"))
    relowered = compile(extract_compute(import_torch_program()))
    expected = schedir.simulate(relowered, COSTS, progress_model="blocking_serial").span
    assert (facts["kind"], facts["unit"]) == ("predicted", "s")
    assert facts["span"] == pytest.approx(expected)
    schedir.save_timeline(replace(run, progress_model="per_edge"), "edge.timeline")
    run_command(capsys, "print", "edge.timeline", "--relower", "-O", "overlap", "-o", "edge.sched")
    programs = [
        compile(extract_compute(import_torch_program()), progress_model=model, overlap=True)
        for model in ("per_edge", "blocking_serial")
    ]
    assert load_program("edge.sched") == programs[0] != programs[1]
    slow = json.loads(run_command(capsys, "simulate", "x.timeline", "--relower", AT, "--json"))
    ordered = compile(
        extract_compute(import_torch_program()), costs=COSTS, progress_model="blocking_serial"
    )
    assert slow["span"] == schedir.simulate(ordered, COSTS, progress_model="blocking_serial").span
