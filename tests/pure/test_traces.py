"""Tests of documented GPU traces: a trace written from a Timeline is read as that Timeline."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedir import schedules
from schedir.analysis.progress_models import MODELS
from schedir.compiler.compile import compile
from schedir.errors import TraceError
from schedir.ir.cost.costs import Costs
from schedir.ir.isa.instructions import COMPUTE_OPS, SEND_OPS
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.predict.simulate import simulate
from schedir.predict.timeline import Timeline
from schedir.traces import trace_files
from schedir.traces import trace_import as run_module
from schedir.traces.clock_alignment import align_clocks
from schedir.traces.kineto import read_trace
from schedir.traces.trace_import import read_run
from schedir.verify.check import check
from tests import kineto
from tests.commands import run_command, run_refused_command

UNIT = 1e-5  # seconds per unit of cost


def simulate_random_costs(program: Program, seed: int, send: float = 1.0) -> Timeline:
    rng = np.random.default_rng(seed)
    n = program.shape.stages
    costs = {name: tuple(rng.integers(1, 9, n).astype(float).tolist()) for name in "FBIW"}
    return simulate(program, Costs(**costs, send=send), progress_model="per_edge")


PROGRAMS = [
    compile(schedules.one_f_one_b, PipelineShape(3, 5)),
    compile(schedules.gpipe, PipelineShape(2, 3)),
    compile(schedules.interleaved, PipelineShape(2, 4, 2)),
    compile(schedules.zb_v, PipelineShape(2, 4, 2, "vee")),
    compile(schedules.dualpipe_v, PipelineShape(2, 4, 2, "vee")),
    compile(schedules.zb_h1, PipelineShape(4, 4)),
]

OVERLAPPED = [
    compile(schedules.one_f_one_b, PipelineShape(3, 5), overlap=True),
    compile(schedules.interleaved, PipelineShape(2, 4, 2), overlap=True),
    compile(schedules.dualpipe_v, PipelineShape(2, 4, 2, "vee"), overlap=True),
]


@settings(max_examples=40)
@given(st.sampled_from(PROGRAMS), st.integers(0, 2**31), st.booleans(), st.integers(1, 2))
def test_written_trace_reads_as_timeline(
    program: Program, seed: int, packed: bool, replicas: int
) -> None:
    runs = [simulate_random_costs(program, seed + k) for k in range(2)]
    with TemporaryDirectory() as folder:
        kineto.write_traces(Path(folder), runs, seed, unit=UNIT, packed=packed, replicas=replicas)
        for step, expected in ((None, runs[1]), (5, runs[0]), (6, runs[1])):
            run = read_run([folder], step=step, name=program.name)
            assert_same_times(run.timeline, expected, 2e-9)
            assert (run.timeline.clock_error, run.timeline.progress_model) == (0, "per_device")
            assert any("replicas" in note for note in run.notes) == (replicas > 1)


def assert_same_times(got: Timeline, want: Timeline, tolerance: float) -> None:
    """Assert that forwards, backwards and messages have the times of the original Timeline."""
    assert got.program == want.program
    assert (got.kind, got.unit, got.blocking_hosts) == ("measured", "s", False)
    known = want.spans["end"] > want.spans["start"]
    for name in ("start", "end"):
        got_times = got.spans[name] - got.start_time
        expected_times = (want.spans[name] - want.start_time) * UNIT
        np.testing.assert_allclose(got_times[known], expected_times[known], atol=tolerance, rtol=0)
    np.testing.assert_allclose(got.busy, want.busy * UNIT, atol=tolerance * len(want))


@settings(deadline=None, max_examples=20)
@given(st.sampled_from(OVERLAPPED), st.integers(0, 2**31), st.booleans())
def test_batched_messages_have_one_kernel(program: Program, seed: int, own: bool) -> None:
    """Traces have one range per batch, or one range per message as those of our executor."""
    expected = simulate_random_costs(program, seed)
    with TemporaryDirectory() as folder:
        kineto.write_traces(Path(folder), [expected], seed, unit=UNIT, own=own)
        got = read_run([folder], name=program.name).timeline
    assert got.program == program
    compute = np.isin(got.spans["op"], COMPUTE_OPS)
    for name in ("start", "end"):
        got_times = got.spans[name][compute] - got.start_time
        expected_times = (expected.spans[name][compute] - expected.start_time) * UNIT
        np.testing.assert_allclose(got_times, expected_times, atol=2e-9, rtol=0)
    sent = np.isin(got.spans["op"], SEND_OPS)
    assert (got.spans["end"][sent] >= expected.spans["end"][sent] * UNIT - 2e-9).all()


@settings(max_examples=25)
@given(
    st.sampled_from(PROGRAMS),
    st.integers(0, 2**31),
    st.lists(st.integers(-(10**9), 10**9), min_size=4, max_size=4),
)
def test_clocks_are_aligned(program: Program, seed: int, offsets: list[int]) -> None:
    expected = simulate_random_costs(program, seed)
    hosts = [rank % 3 for rank in range(program.shape.ranks)]
    with TemporaryDirectory() as folder:
        kineto.write_traces(Path(folder), [expected], seed, unit=UNIT, hosts=hosts, offsets=offsets)
        run = read_run([folder], name=program.name)
    error = run.timeline.clock_error
    assert_same_times(run.timeline, expected, 2 * error + 3e-9)
    assert 0 < error <= len(set(hosts)) * 3 * expected.span * UNIT
    assert run.timeline.causality_warning == ""
    assert any("aligned by their messages" in note for note in run.notes)


@given(st.integers(2, 5), st.integers(0, 2**31))
def test_clock_offsets_are_within_stated_error(hosts: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    true_offsets = rng.uniform(-1, 1, hosts)
    ring_edges = [(a, b) for a in range(hosts) for b in ((a + 1) % hosts, (a - 1) % hosts)] * 3
    sender, receiver = np.array(ring_edges).T
    took = rng.exponential(1e-3, len(ring_edges))
    alignment = align_clocks(
        "abcde"[:hosts], sender, receiver, took + true_offsets[receiver] - true_offsets[sender]
    )
    offset_errors = (alignment.offsets - alignment.offsets[0]) - (true_offsets - true_offsets[0])
    assert np.abs(offset_errors[:, None] - offset_errors[None]).max() <= alignment.error + 1e-12
    with pytest.raises(TraceError, match="before it was sent"):
        align_clocks("ab", np.array([0, 1]), np.array([1, 0]), np.array([-1.0, 0.5]))
    with pytest.raises(TraceError, match="no messages go from b to a"):
        align_clocks("ab", np.array([0]), np.array([1]), np.array([1.0]))


# ---------------------------------------------------------------- unreadable traces


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """Write the traces of one step of 1F1B on two ranks, and return their folder."""
    program = compile(schedules.one_f_one_b, PipelineShape(2, 3))
    kineto.write_traces(tmp_path, [simulate_random_costs(program, 1)], 1, unit=UNIT)
    return tmp_path


def edit_trace(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def find_trace(folder: Path, rank: int) -> Path:
    (path,) = folder.glob(f"*{rank}.json")
    return path


def list_ranges(content: dict[str, Any]) -> list[dict[str, Any]]:
    return [e for e in content["traceEvents"] if e["cat"] == "user_annotation"]


def remove_events(*prefixes: str) -> Callable[[dict[str, Any]], object]:
    def edit(content: dict[str, Any]) -> None:
        content["traceEvents"] = [
            e for e in content["traceEvents"] if not e["name"].startswith(prefixes)
        ]

    return edit


def rename_events(old: str, new: str) -> Callable[[dict[str, Any]], object]:
    def edit(content: dict[str, Any]) -> None:
        for event in content["traceEvents"]:
            event["name"] = new if event["name"] == old else event["name"]

    return edit


WRONG: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no_marks": (remove_events("PP:"), "has a range of an instruction"),
    "unknown_mark": (rename_events("PP:0F1", "PP:0G1"), "does not name an instruction"),
    "no_kernels": (
        lambda c: c.update(traceEvents=list_ranges(c)),
        "is from a run over NCCL, but has no kernels",
    ),
    "no_events": (lambda c: c.pop("traceEvents"), "not a trace of torch.profiler"),
    "lost_forward": (remove_events("PP:0F1"), "F 0.1 is missing on rank 0"),
    "no_clock": (lambda c: list_ranges(c)[0].update(ts=1e300), "has an invalid time"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_files_are_refused(
    case: str, traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit, fact = WRONG[case]
    edit_trace(find_trace(traces, 0), edit)
    if case == "no_marks":
        edit_trace(find_trace(traces, 1), edit)
        fact = "none of 2 files has a range of an instruction"
    out = traces / "x.timeline"
    assert fact in run_refused_command(capsys, "import", str(traces), "-o", str(out))
    assert not out.exists()


@pytest.mark.parametrize("packed", [False, True])
def test_error_of_truncated_file_has_its_path(packed: bool, tmp_path: Path) -> None:
    runs = [simulate_random_costs(PROGRAMS[1], 1)]
    path = kineto.write_traces(tmp_path, runs, 1, unit=UNIT, packed=packed)[0]
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(TraceError, match=re.escape(str(path))):
        read_trace(path)


def test_result_files_are_not_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "summary.json").write_text('{"steps": 20}')
    text = run_refused_command(capsys, "import", str(tmp_path), "-o", str(tmp_path / "x.timeline"))
    assert "hint: schedir train --trace DIR writes a timeline" in text


def test_missing_rank_is_refused(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    find_trace(traces, 0).unlink()
    text = run_refused_command(capsys, "import", str(traces), "-o", str(traces / "x.timeline"))
    assert "the traces have stage 1, but not stage 0" in text and "a rank missing?" in text


def test_unmarked_messages_are_added(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The import adds the messages and notes it. Forwards and backwards keep their times."""
    marked = read_run([traces]).timeline
    for rank in (0, 1):
        edit_trace(find_trace(traces, rank), lambda content: remove_messages(content))
    unmarked = read_run([traces], name="mine")
    assert any("messages have no ranges" in note for note in unmarked.notes)
    assert unmarked.timeline.program.name == "mine-lowered"
    for timeline in (marked, unmarked.timeline):
        check(timeline.program, "blocking_serial")
    spans = [t.spans[np.isin(t.spans["op"], COMPUTE_OPS)] for t in (marked, unmarked.timeline)]
    assert (spans[0] == spans[1]).all()
    assert unmarked.timeline.causality_warning == ""
    sends = unmarked.timeline.spans[np.isin(unmarked.timeline.spans["op"], SEND_OPS)]
    assert (sends["end"] >= sends["start"]).all() and len(sends) == 6


def remove_messages(content: dict[str, Any]) -> None:
    content["traceEvents"] = [
        e for e in content["traceEvents"] if not re.search("SEND_|RECV_|SendRecv", e["name"])
    ]


def test_second_run_of_schedule_in_step_is_read(traces: Path) -> None:
    """Repeated marks are a second run of the schedule. The import reads the last run."""
    program = compile(schedules.one_f_one_b, PipelineShape(2, 3))
    runs = [simulate_random_costs(program, seed) for seed in (3, 4)]
    for path in traces.iterdir():
        path.unlink()
    kineto.write_traces(traces, runs, 1, unit=UNIT)
    for path in traces.iterdir():
        edit_trace(path, remove_events("ProfilerStep"))
    run = read_run([traces], name=program.name)
    assert run.step == "the complete trace, the second of 2 times that it ran the schedule"
    assert_same_times(run.timeline, runs[1], 2e-9)


def test_parallel_reading_gives_same_timeline(
    traces: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, read_paths = read_run([traces]), list[Path]()
    monkeypatch.setattr(trace_files, "PARALLEL_READ_BYTES", 1)
    parallel = read_run([traces], on_read=read_paths.append)
    assert (alone.timeline.spans == parallel.timeline.spans).all()
    assert sorted(read_paths) == sorted(traces.iterdir())
    find_trace(traces, 1).write_text("{")
    with pytest.raises(TraceError, match="it is cut off"):
        read_run([traces])


def test_step_option_selects_profiler_step(
    traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(traces / "x.timeline")
    text = run_refused_command(capsys, "import", str(traces), "-o", out, "--step", "7")
    assert "do not all have ProfilerStep 7" in text and "they have 5" in text
    edit_trace(find_trace(traces, 0), rename_events("ProfilerStep#5", "ProfilerStep#4"))
    text = run_refused_command(capsys, "import", str(traces), "-o", out)
    assert "the traces of the ranks have no ProfilerStep in common" in text
    for rank in (0, 1):
        edit_trace(find_trace(traces, rank), remove_events("ProfilerStep"))
    assert "the complete trace" in run_command(capsys, "import", str(traces), "-o", out)


def test_import_options_and_file_names(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(path) for path in sorted(traces.iterdir())]
    out = str(traces / "x.timeline")
    assert "cannot read nowhere: no such file" in run_refused_command(
        capsys, "import", "nowhere", "-o", out
    )
    assert "must end in .timeline" in run_refused_command(capsys, "import", *files, "-o", "x.csv")
    text = run_refused_command(capsys, "import", *files, "-o", out, "--costs", "F=1")
    assert "--costs does not apply to traces" in text
    text = run_refused_command(capsys, "import", *files, "-o", out, "--ranks", "3")
    assert "--ranks is 3, but these traces have 2 pipeline ranks" in text
    empty = traces / "empty"
    empty.mkdir()
    text = run_refused_command(capsys, "import", str(empty), "-o", out)
    assert "has no traces" in text and "hint" not in text
    below = empty / "below"
    below.mkdir()
    (below / "x.json").write_text("[]")
    assert f"hint: {below} has traces" in run_refused_command(
        capsys, "import", str(empty), "-o", out
    )
    assert "not a trace of torch.profiler" in run_refused_command(
        capsys, "import", str(below), "-o", out
    )
    text = run_command(capsys, "import", str(traces / "*.json"), "-o", str(traces / "x.sched"))
    assert "2 ranks, 2 stages, 3 microbatches" in text
    assert "complete and in order" in run_command(capsys, "check", str(traces / "x.sched"))


def test_all_gpu_progress_models_are_tried() -> None:
    assert {*run_module._GPU_MODELS, "blocking_serial"} == {*MODELS}
