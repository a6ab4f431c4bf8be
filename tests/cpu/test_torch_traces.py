"""Tests of traces of real runs of torch's schedules, against torch and against manual counts."""

from __future__ import annotations

import builtins
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from schedir.__main__ import main
from schedir.compiler.compile import compile
from schedir.errors import TraceError
from schedir.io import torch_csv
from schedir.io.timeline_file import load_timeline
from schedir.ir.isa.instructions import COMPUTE_OPS
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.predict.timeline import Timeline
from schedir.schedules import one_f_one_b
from schedir.traces.trace_import import read_run
from schedir.transports.gloo import GlooTransport
from tests.cases import cases
from tests.commands import run_command
from tests.cpu import torch_profiler_traces
from tests.cpu.gloo_processes import run
from tests.cpu.tiny_stages import gpt_executor, make_replica_batch, paired_1f1b
from tests.cpu.torch_profiler_traces import MICROBATCHES, RANKS
from tests.tutorial import read_blocks

_COMPUTE = re.compile(r"PP:\d+[FBIW]\d+|PP:\(.*\)OVERLAP_F_B|(Forward|Backward) \d+")


Traces = tuple[Path, list[dict[str, list[str]]]]


@pytest.fixture(scope="module")
def trace_folder(tmp_path_factory: pytest.TempPathFactory) -> Traces:
    """Return a folder with the traces of each schedule, and each rank's order from torch."""
    folder = tmp_path_factory.mktemp("traces")
    for name in (*torch_profiler_traces.NAMES, "evaluated"):
        (folder / name).mkdir()
    return folder, run(torch_profiler_traces.run_profiled_steps, RANKS, str(folder))


def compute_times_by_hand(path: Path) -> tuple[float, float, float]:
    """Return the busy seconds, the first start and the last end of a rank's last step.

    Only forwards and backwards count, without waits.
    """
    events = torch_profiler_traces.read_ranges(path)
    step = max((e for e in events if e["name"].startswith("ProfilerStep")), key=lambda e: e["ts"])
    busy, first, last = 0.0, np.inf, -np.inf
    for event in events:
        start, end = event["ts"], event["ts"] + event["dur"]
        if not _COMPUTE.fullmatch(event["name"]) or not step["ts"] <= start:
            continue
        within = [e for e in events if start <= e["ts"] and e["ts"] + e["dur"] <= end]
        own_ops = (e for e in within if e["cat"] == "cpu_op" and "c10d" not in e["name"])
        ops = [e["ts"] + e["dur"] for e in own_ops]
        waited = 0.0
        for wait in events:
            wait_end = wait["ts"] + wait["dur"]
            if wait["name"] == "gloo:recv" and start < wait_end <= end:
                wait_start = max([start, *(t for t in ops if t < wait_end)])
                waited += wait_end - wait_start
        sends = [e["ts"] for e in within if e["name"] == "c10d::send"]
        stop = min([end, *sends])
        busy += stop - start - waited
        if "OVERLAP" not in event["name"]:
            first, last = min(first, start + waited), max(last, stop)
    return busy / 1e6, first / 1e6, last / 1e6


def split_cells(program: Program) -> list[list[str]]:
    """Return the cells of the CSV for torch."""
    return [row.split(",") for row in torch_csv.to_csv(program).splitlines()]


def assert_ordered_within_ranks(timeline: Timeline) -> None:
    """Check that no instruction comes before a cause on its own rank.

    Causes on other ranks are left out: the profiler of each process converts the time-stamp counter
    of its processor by itself, so the clocks of two processes may differ by some 0.1 ms.
    """
    violations, rank = timeline.causality_violations, timeline.spans["rank"]
    effect = np.flatnonzero(violations.amount)
    assert (rank[effect] != rank[violations.cause[effect]]).all(), timeline.causality_warning


@pytest.mark.parametrize("name", torch_profiler_traces.NAMES)
def test_imported_trace_matches_torch_and_manual_times(
    name: str, trace_folder: Traces, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, order = trace_folder
    out = folder / f"{name}.timeline"
    text = run_command(capsys, "import", str(folder / name), "-o", str(out))
    assert f"ProfilerStep {torch_profiler_traces.STEPS}:" in text
    timeline = load_timeline(out)
    program = timeline.program

    # The compute is that of torch.
    if name == "GPipe":
        expected = [
            [f"{r}{op}{mb}" for op in "FB" for mb in range(MICROBATCHES)] for r in range(RANKS)
        ]
    else:
        torch_program = torch_csv.from_csv("\n".join(",".join(rank[name]) for rank in order))
        expected = split_cells(torch_program)
    assert split_cells(program) == expected

    # Busy times and the bubble are those of a manual calculation.
    manual_times = [compute_times_by_hand(folder / name / f"rank{r}.json") for r in range(RANKS)]
    busy = np.array([b for b, _, _ in manual_times])
    np.testing.assert_allclose(timeline.busy, busy, atol=2e-6)
    if name != "DualPipeV":  # its traces do not contain the start of each half of a pair
        compute = timeline.spans[np.isin(timeline.spans["op"], COMPUTE_OPS)]
        length = max(e for _, _, e in manual_times) - min(s for _, s, _ in manual_times)
        assert compute["end"].max() - compute["start"].min() == pytest.approx(length, abs=2e-6)
    assert timeline.bubble == pytest.approx(1 - busy.sum() / RANKS / timeline.span, abs=1e-4)
    assert timeline.idle.sum() / RANKS / timeline.span == pytest.approx(timeline.bubble)
    assert (timeline.kind, timeline.unit, timeline.blocking_hosts) == ("measured", "s", True)

    assert_ordered_within_ranks(timeline)


@pytest.mark.parametrize("name", cases(["DualPipeV"], ["Interleaved1F1B"]))
def test_commands_accept_imported_timeline(
    name: str, trace_folder: Traces, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = trace_folder
    out = str(folder / f"{name}-all.timeline")
    run_command(capsys, "import", str(folder / name), "-o", out)
    checked = run_command(capsys, "check", out, "--progress-model", "per_device")
    assert "finish under per_device" in checked
    assert main(["calibrate", out]) == 0
    costs = capsys.readouterr().out.strip()  # it may write a note about delays to standard error
    predicted = str(folder / "predicted.timeline")
    run_command(capsys, "simulate", out, "--costs", costs, "-o", predicted)
    for argv in (
        ["simulate", out],
        ["explain", out],
        ["compare", predicted, out],
        ["draw", out, "-o", str(folder / "run.svg")],
        ["export", out, "--to", "torch-2.13", "-o", str(folder / "run.csv")],
        ["print", out],
    ):
        assert run_command(capsys, *argv)


def test_files_may_have_any_order_and_step_may_be_chosen(trace_folder: Traces) -> None:
    folder, _ = trace_folder
    files = [folder / "ZBVZeroBubble" / f"rank{r}.json" for r in (1, 0)]
    first, last = read_run(files, step=1), read_run(files)
    assert first.step == "ProfilerStep 1"
    assert last.step == f"ProfilerStep {torch_profiler_traces.STEPS}"
    assert first.timeline.program == last.timeline.program
    assert isinstance(first.timeline, Timeline)
    assert (first.timeline.spans["end"] != last.timeline.spans["end"]).any()


def test_evaluation_is_skipped(trace_folder: Traces) -> None:
    """torch marks backwards in an evaluation too, but they contain no work."""
    folder, _ = trace_folder
    imported = read_run([folder / "evaluated"])
    first, last = imported.steps
    assert imported.step == f"ProfilerStep {first}"
    assert f"skipped ProfilerStep {last}: it is an evaluation" in imported.notes
    with pytest.raises(TraceError, match=f"ProfilerStep {last} is an evaluation"):
        read_run([folder / "evaluated"], step=last)


def test_unmarked_wait_counts_as_compute_with_note(trace_folder: Traces, tmp_path: Path) -> None:
    """Without Gloo's marks a wait within a range counts as work, and a note says so."""
    folder, _ = trace_folder
    marked = read_run([folder / "ZBVZeroBubble"])
    busy = []
    for path in sorted((folder / "ZBVZeroBubble").iterdir()):
        content = json.loads(path.read_text())
        events = [e for e in content["traceEvents"] if e["name"] != "gloo:recv"]
        (tmp_path / path.name).write_text(json.dumps({**content, "traceEvents": events}))
        step = max(e["ts"] for e in events if e["name"].startswith("ProfilerStep"))
        named = [e for e in events if _COMPUTE.fullmatch(e["name"]) and e["ts"] > step]
        busy.append(sum(e["dur"] for e in named) / 1e6)
    unmarked = read_run([tmp_path])
    np.testing.assert_allclose(unmarked.timeline.busy, busy, atol=2e-6)
    assert any("counts as compute" in note for note in unmarked.notes)
    assert not any("counts as compute" in note for note in marked.notes)


SHAPE = PipelineShape(2, 3)
EXECUTOR_PROGRAMS = {
    "grouped": compile(one_f_one_b, SHAPE, overlap=True),
    "paired": compile(paired_1f1b, PipelineShape(2, 4), progress_model="per_edge"),
    "tied_weights": compile(one_f_one_b, SHAPE, tied_weights=True, clip_grad_norm=True),
}


def _profile_executor(rank: int, folder: str) -> None:
    """Profile a step of our own executor, with grouped messages and joined pairs."""
    for name, program in EXECUTOR_PROGRAMS.items():
        transport = GlooTransport(program)
        executor, inputs = gpt_executor(program, transport), make_replica_batch(program, transport)
        executor.step(*inputs)
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
            executor.step(*inputs)
        profiler.export_chrome_trace(f"{folder}/{name}/rank{rank}.json")


def test_page_code_writes_trace_of_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code writes one file of one step, and creates the folder."""
    page = Path(__file__).parents[2] / "docs" / "how-to" / "import-traces.md"
    code = next(body for language, body in read_blocks(page.read_text()) if language == "python")
    monkeypatch.chdir(tmp_path)
    names = {"rank": 3, "batches": range(16), "train_step": lambda batch: torch.ones(2) + batch}
    exec(builtins.compile(code, page.name, "exec"), names)
    (file,) = (tmp_path / "traces").iterdir()
    assert file.name.startswith("rank3.")
    assert set(re.findall(r"ProfilerStep#\d+", file.read_text())) == {"ProfilerStep#6"}


def test_trace_of_executor_gives_its_program(tmp_path: Path) -> None:
    for name in EXECUTOR_PROGRAMS:
        (tmp_path / name).mkdir()
    run(_profile_executor, 2, str(tmp_path))
    for name, program in EXECUTOR_PROGRAMS.items():
        names = ("tied_weights", "clip_grad_norm")
        attributes = {attribute: getattr(program, attribute) for attribute in names}
        imported = read_run([tmp_path / name], name=program.name, program_attributes=attributes)
        assert imported.timeline.program == program
        assert_ordered_within_ranks(imported.timeline)
