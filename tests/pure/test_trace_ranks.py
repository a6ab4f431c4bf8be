"""Tests of incomplete or ambiguous traces, and of the notes about them.

All traces are of 1F1B with two microbatches on two stages, with GPU times in microseconds:

    stage 0   F0 100-200   F1 200-300                B0 600-800               B1 900-1100
    stage 1                F0 250-350   B0 350-550   F1 550-650   B1 650-850
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schedir.errors import SchedirError, TraceError
from schedir.ir.isa.instructions import COMPUTE_OPS
from schedir.traces.trace_import import read_run
from tests.commands import run_command

BASE = 1_790_857_026 * 10**9
NCCL = "ncclDevKernel_SendRecv"
# For each stage: its marks, and the start and end of the kernel of each.
STAGES: list[list[tuple[str, int, int]]] = [
    [
        ("0F0", 100, 200), ("0SEND_F0", 200, 250), ("0F1", 200, 300), ("0SEND_F1", 300, 350),
        ("0RECV_B0", 300, 600), ("0B0", 600, 800), ("0RECV_B1", 600, 900), ("0B1", 900, 1100),
    ],
    [
        ("1RECV_F0", 50, 250), ("1F0", 250, 350), ("1B0", 350, 550), ("1SEND_B0", 550, 600),
        ("1RECV_F1", 250, 350), ("1F1", 550, 650), ("1B1", 650, 850), ("1SEND_B1", 850, 900),
    ],
]  # fmt: skip


def make_event(
    cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: Any
) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "tid": tid, "ts": ts, "dur": dur, "args": args}


def make_kernel_launch(
    number: int, name: str, launch_time: float, start: float, end: float, stream: int = 7
) -> list[Any]:
    return [
        make_event("cuda_runtime", "cudaLaunchKernel", launch_time, 0.5, correlation=number),
        make_event("kernel", name, start, end - start, stream, correlation=number),
    ]


def write_trace(
    folder: Path,
    rank: int,
    stage: int,
    *,
    ahead: float = 0,
    host: str = "a",
    groups: Sequence[Sequence[int]] = (),
    extra_events: Sequence[dict[str, Any]] = (),
    missing_kernels: Sequence[str] = (),
    has_messages: bool = True,
) -> None:
    """Write a rank's trace, with a clock offset, missing kernels, and with or without messages."""
    events = [*extra_events]
    for k, (mark, start, end) in enumerate(STAGES[stage]):
        is_message = "_" in mark
        if is_message and not has_messages:
            continue
        events.append(make_event("user_annotation", f"PP:{mark}", 5 * k, 4))
        name = NCCL if is_message else "gemm"
        if {mark, name}.isdisjoint(missing_kernels):
            events += make_kernel_launch(k, name, 5 * k + 1, start, end, 20 if is_message else 7)
    save_events(folder, rank, [{**e, "ts": e["ts"] + ahead} for e in events], host, groups)


def save_events(
    folder: Path,
    rank: int,
    events: Sequence[dict[str, Any]],
    host: str = "a",
    groups: Sequence[Sequence[int]] = (),
    backend: str = "nccl",
) -> None:
    config = [{"pg_name": str(k), "ranks": ranks} for k, ranks in enumerate(groups)]
    content = {
        "distributedInfo": {"backend": backend, "rank": rank, "pg_config": config},
        "host_name": host,
        "baseTimeNanoseconds": BASE,
        "traceEvents": events,
    }
    (folder / f"{rank}.json").write_text(json.dumps(content))


def read_compute_times(folder: Path) -> np.ndarray:
    """Return the starts and ends of forwards and backwards, in microseconds from the first."""
    spans = read_run([folder]).timeline.spans
    spans = spans[np.isin(spans["op"], COMPUTE_OPS)]
    return np.array([spans["start"], spans["end"]]) * 1e6


EXPECTED_TIMES = np.array(
    [[0, 100, 500, 800, 150, 250, 450, 550], [100, 200, 700, 1000, 250, 450, 550, 750]]
)


def test_prefetch_on_other_streams_is_not_compute(tmp_path: Path) -> None:
    """One stream copies parameters for a gather while the forward waits for its message."""
    ahead = make_kernel_launch(90, "all_gather_copy_in", 26, 360, 365, 33)
    late_copy = make_kernel_launch(91, "chunk_cat", 11, 400, 450, 33)
    write_trace(tmp_path, 0, 0, extra_events=late_copy)
    write_trace(tmp_path, 1, 1, extra_events=ahead)
    np.testing.assert_allclose(read_compute_times(tmp_path), EXPECTED_TIMES, atol=1e-2)


def test_missing_kernels_are_reported(tmp_path: Path) -> None:
    write_trace(tmp_path, 0, 0)
    write_trace(tmp_path, 1, 1, missing_kernels=["1F1"])
    notes = read_run([tmp_path]).notes
    assert notes == ("1 forwards and backwards have no kernel: they take no time",)
    write_trace(tmp_path, 1, 1, missing_kernels=[NCCL])
    (note,) = read_run([tmp_path]).notes
    assert note.startswith("4 messages have no kernel")
    events = [
        make_event("user_annotation", f"PP:{name}", 5 * k, 4)
        for k, (name, *_) in enumerate(STAGES[1])
    ]
    save_events(tmp_path, 1, events, backend="")
    with pytest.raises(TraceError, match=r"1\.json has no kernels, but other traces have"):
        read_run([tmp_path])


def test_clocks_are_aligned_without_messages(tmp_path: Path) -> None:
    """Clocks are aligned by forwards and backwards, since messages must lie between them."""
    write_trace(tmp_path, 0, 0, has_messages=False)
    write_trace(tmp_path, 1, 1, has_messages=False, ahead=10**6, host="b")
    timeline = read_run([tmp_path]).timeline
    assert 0 < timeline.clock_error < 1e-3
    np.testing.assert_allclose(
        read_compute_times(tmp_path), EXPECTED_TIMES, atol=1e6 * timeline.clock_error
    )


def test_unknown_host_names_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The hosts have no name, and their clocks differ."""
    write_trace(tmp_path, 0, 0, host="")
    write_trace(tmp_path, 1, 1, host="", ahead=-200)
    text = run_command(capsys, "import", str(tmp_path), "-o", str(tmp_path / "x.timeline"))
    assert "effects up to 0.00015 s before causes" in text
    assert "some traces have no host name: they are assumed to have the same clock" in text


@pytest.mark.parametrize("layout", [[(0, 2), (1, 3)], [(0, 1), (2, 3)], [(0, 3), (1, 2)]])
def test_ranks_of_replicas_are_separated(layout: list[tuple[int, int]], tmp_path: Path) -> None:
    """The process groups tell which ranks communicate. If they do not, there is a note."""
    for replica, chain in enumerate(layout):
        for stage, rank in enumerate(chain):
            groups = [range(4), chain, [other_chain[stage] for other_chain in layout]]
            write_trace(tmp_path, rank, stage, ahead=replica * 10**6, groups=[[*g] for g in groups])
    np.testing.assert_allclose(read_compute_times(tmp_path), EXPECTED_TIMES, atol=1e-2)
    (tmp_path / "0.json").unlink()  # so the other replica is read
    run = read_run([tmp_path])
    np.testing.assert_allclose(read_compute_times(tmp_path), EXPECTED_TIMES, atol=1e-2)
    assert run.notes == ("skipped 1 of 3 traces of replicas with the same stages as others",)
    for path in tmp_path.iterdir():
        content = json.loads(path.read_text())
        del content["distributedInfo"]["pg_config"]
        path.write_text(json.dumps(content))
    assert any("may be of several replicas" in note for note in read_run([tmp_path]).notes)


def make_gpipe_events(rank: int, stage: int, stages: int) -> list[dict[str, Any]]:
    """Return the events that ScheduleGPipe leaves for two microbatches over Gloo."""
    events = []
    for k, name in enumerate(["Forward 0", "Forward 1", "Backward 0", "Backward 1"]):
        time, forward = 1000 * k + 300 * (stage if k < 2 else stages - stage), k < 2
        events.append(make_event("user_annotation", name, time, 200))
        events.append(make_event("cpu_op", "aten::mm", time + 20, 100))
        if stage != (0 if forward else stages - 1):
            events.append(make_event("cpu_op", "c10d::recv_", time + 5, 2))
            events.append(make_event("user_annotation", "gloo:recv", time + 7, 3))
        if stage != (stages - 1 if forward else 0):
            events.append(make_event("cpu_op", "c10d::send", time + 150, 2))
    return events


@pytest.mark.parametrize("layout", [[(0, 2), (1, 3)], [(0, 1), (2, 3)], [(0, 1, 2, 3)]])
def test_replicas_of_unstaged_marks_are_separated(
    layout: list[tuple[int, ...]], tmp_path: Path
) -> None:
    for chain in layout:
        for stage, rank in enumerate(chain):
            groups = [[*range(4)], [*chain], [other_chain[stage] for other_chain in layout]]
            save_events(
                tmp_path,
                rank,
                make_gpipe_events(rank, stage, len(chain)),
                groups=groups,
                backend="gloo",
            )
    shape = read_run([tmp_path]).timeline.program.shape
    assert (shape.ranks, shape.stages) == (len(layout[0]), len(layout[0]))


def test_replicas_of_single_stage_are_no_pipeline(tmp_path: Path) -> None:
    """Four ranks without messages are four replicas, and not a pipeline of four stages."""
    for rank in range(4):
        save_events(
            tmp_path, rank, make_gpipe_events(rank, 0, 1), groups=[[0, 1, 2, 3]], backend="gloo"
        )
    run = read_run([tmp_path])
    assert run.timeline.program.shape.stages == 1
    assert run.timeline.bubble > 0 and "3 of 4 traces of replicas" in run.notes[0]


def test_older_trace_formats_are_read(tmp_path: Path) -> None:
    """Older torch wrote times since 1970 without a base. The host name may come last."""
    for rank in (0, 1):
        write_trace(tmp_path, rank, rank, host="ab"[rank], ahead=rank * 10**6)
    original = read_run([tmp_path])
    for path in tmp_path.iterdir():
        content = json.loads(path.read_text())
        path.write_text(json.dumps(dict(reversed(content.items()))))
    behind = read_run([tmp_path])
    assert behind.timeline.clock_error == original.timeline.clock_error > 0
    np.testing.assert_array_equal(behind.timeline.spans, original.timeline.spans)
    for path in tmp_path.iterdir():
        content = json.loads(path.read_text())
        since = content.pop("baseTimeNanoseconds") / 1e3
        for trace_event in content["traceEvents"]:
            trace_event["ts"] += since
        path.write_text(json.dumps(content))
    # Times since 1970 have a precision of 0.25 us.
    np.testing.assert_allclose(read_compute_times(tmp_path), EXPECTED_TIMES, atol=70)


def test_trace_that_begins_within_step_has_note(tmp_path: Path) -> None:
    """The error about the program says that the trace may begin within a step."""
    for rank in (0, 1):
        write_trace(tmp_path, rank, rank)
        content = json.loads((tmp_path / f"{rank}.json").read_text())
        events = content["traceEvents"]
        repeated_marks = [
            {**e, "ts": e["ts"] + 10**4, "args": {}} for e in events if "PP:" in e["name"]
        ]
        content["traceEvents"] = [e for e in events if e["name"] != f"PP:{rank}F0"] + repeated_marks
        (tmp_path / f"{rank}.json").write_text(json.dumps(content))
    with pytest.raises(SchedirError) as caught:
        read_run([tmp_path])
    assert "begin the trace before a step" in caught.value.__notes__[-1]


def test_ranks_without_common_step_are_refused(tmp_path: Path) -> None:
    for rank in (0, 1):
        write_trace(
            tmp_path,
            rank,
            rank,
            extra_events=[make_event("user_annotation", f"ProfilerStep#{rank + 4}", 0, 90)],
        )
    with pytest.raises(TraceError) as caught:
        read_run([tmp_path])
    assert "one trace has [4] and one trace has [5]" in str(caught.value)


def test_missing_sched_getaffinity_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("os.sched_getaffinity")
    for rank in (0, 1):
        write_trace(tmp_path, rank, rank)
    assert read_run([tmp_path]).timeline.ranks == 2


@pytest.mark.parametrize("begin", ['{"a":', '{"traceEvents":[{"args":'])
def test_nested_files_are_refused(begin: str, tmp_path: Path) -> None:
    (tmp_path / "0.json").write_text(begin + "[" * 10**5)
    with pytest.raises(TraceError, match=r"0\.json is nested too deeply for a trace"):
        read_run([tmp_path])
