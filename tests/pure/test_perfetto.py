"""Tests that Perfetto traces follow the rules of the format, and show the run."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import schedir
from schedir import Costs, PipelineShape
from schedir.analysis.progress_models import MODELS, ProgressModel
from schedir.compiler.compile import lower
from schedir.errors import UsageError
from schedir.io import perfetto
from schedir.ir.cost.sizes import Sizes
from schedir.ir.isa.instructions import COMPUTE_OPS, SEND_OPS
from schedir.ir.program import Program
from schedir.passes.communication.transfer_overlap import group_opposite_transfers
from schedir.predict.bubble_causes import IdleCause, idleness, sum_by_cause
from schedir.schedules import dualpipe_v, gpipe, one_f_one_b
from tests.commands import run_command, run_refused_command
from tests.strategies import compute_programs, costs

Event = dict[str, Any]
# The fields that "Trace Event Format" requires for each phase, in addition to `ph`.
FIELDS = {
    "X": {"name", "pid", "tid", "ts", "dur", "args"},
    "s": {"name", "cat", "id", "pid", "tid", "ts"},
    "f": {"name", "cat", "id", "pid", "tid", "ts", "bp"},
    "C": {"name", "pid", "ts", "args"},
    "M": {"name", "pid", "args"},
}


def parse_trace(text: str) -> list[Event]:
    """Return the events of a trace with times in whole nanoseconds, and check the rules."""
    trace = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    events: list[Event] = trace["traceEvents"]
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        assert event.keys() - {"tid"} >= FIELDS[event["ph"]] - {"tid", "ph"}, event
        assert isinstance(event["pid"], int) and isinstance(event.get("tid", 0), int)
        for name in {"ts", "dur"} & event.keys():
            assert event[name] >= 0 and abs(event[name] * 1000 % 1 - 0.5) > 0.4, event
            event[name] = round(event[name] * 1000)
        if event["ph"] == "X":
            end = event["ts"] + event["dur"]
            tracks[event["pid"], event["tid"]].append((event["ts"], end))
    for spans in tracks.values():  # events on a track do not overlap
        spans.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
    check_flows(events, tracks)
    tracks_with_name = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert tracks_with_name == tracks.keys()
    threads = [tid for _, tid in tracks_with_name]
    assert len({*threads}) == len(threads) and not {*threads} & {e["pid"] for e in events}
    return events


def check_flows(events: list[Event], tracks: dict[tuple[int, int], list[tuple[int, int]]]) -> None:
    """Assert that each arrow has one start and one later end, both within a slice."""
    arrow_events: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in "sf":
            arrow_events[event["id"]].append(event)
            time = event["ts"]
            assert any(a <= time <= b for a, b in tracks[event["pid"], event["tid"]]), event
    for pair in arrow_events.values():
        assert [e["ph"] for e in pair] == ["s", "f"] and pair[0]["ts"] <= pair[1]["ts"]
        assert pair[0]["pid"] != pair[1]["pid"]


@given(compute_programs(), st.data(), st.sampled_from(MODELS), st.booleans(), st.booleans())
def test_trace_of_random_run_is_valid(
    draft: Program,
    data: st.DataObject,
    progress_model: ProgressModel,
    grouped: bool,
    measured: bool,
) -> None:
    program = group_opposite_transfers(lower(draft)) if grouped else lower(draft)
    timeline = schedir.simulate(
        program,
        data.draw(costs(draft.shape)),
        progress_model="per_edge" if grouped else progress_model,
    )
    if measured:
        scale = data.draw(st.floats(1e-6, 1e-2))
        spans = timeline.spans.copy()
        spans["start"], spans["end"] = spans["start"] * scale + 0.1, spans["end"] * scale + 0.1
        timeline = replace(timeline, spans=spans, kind="measured", unit="s")
    events = parse_trace(perfetto.to_json(timeline))
    kinds = Counter(event["ph"] for event in events)
    sends = int(np.isin(timeline.spans["op"], SEND_OPS).sum())
    assert kinds["s"] == kinds["f"] == sends
    assert kinds["X"] == len(timeline) + len(idleness(timeline))


def test_trace_contains_compute_idle_time_and_peaks() -> None:
    program = schedir.compile(one_f_one_b, PipelineShape(3, 4), clip_grad_norm=True)
    timeline = schedir.simulate(program, Costs(F=1, B=2, send=0.25))
    events = parse_trace(perfetto.to_json(timeline))
    slices = [e for e in events if e["ph"] == "X"]
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {*threads.values()} == {
        "compute", "idle", "act in", "act out", "grad in", "grad out", "dp",
    }  # fmt: skip
    # A unit of the costs is a millisecond.
    backward_slice = next(e for e in slices if e["name"] == "B 2.0")
    assert (backward_slice["pid"], backward_slice["ts"], backward_slice["dur"]) == (
        2,
        3_500_000,
        2_000_000,
    )
    idle = sum_by_cause(idleness(timeline), 3) * 1e6
    for e in slices:
        if threads[e["tid"]] == "idle":
            idle[e["pid"], IdleCause[e["name"].upper()]] -= e["dur"]
    assert not idle.any()
    assert compute_peaks(events, "in flight", 3) == timeline.peak_in_flight.tolist()
    waits = [e["args"]["awaits"] for e in slices if e["pid"] == 2 and e["name"] == "warmup"]
    assert waits == ["F 1.0 on rank 1"]


def compute_peaks(events: list[Event], name: str, ranks: int) -> list[float]:
    counters_by_rank = [
        [e for e in events if e["name"] == name and e["pid"] == r] for r in range(ranks)
    ]
    return [max(sum(e["args"].values()) for e in counts) for counts in counters_by_rank]


def test_trace_counts_bytes() -> None:
    program = schedir.compile(one_f_one_b, PipelineShape(3, 4))
    timeline = schedir.simulate(program, sizes=Sizes(activation=3, saved=5, model_states=7))
    events = parse_trace(perfetto.to_json(timeline))
    assert compute_peaks(events, "bytes", 3) == timeline.peak_memory.tolist()


def test_overlapped_pair_is_one_slice() -> None:
    program = schedir.compile(dualpipe_v, PipelineShape(4, 10, 2, "vee"))
    timeline = schedir.simulate(program, Costs(send=0.5))
    events = parse_trace(perfetto.to_json(timeline))
    pairs = sum(int((s.joined & np.isin(s.op, COMPUTE_OPS)).sum()) for s in program.streams)
    assert pairs and pairs == sum(" & " in e["name"] for e in events)


def test_overlapping_messages_have_separate_threads() -> None:
    """With several stages per rank, two activations may be sent in one direction at once."""
    spread = PipelineShape(3, 4, placement=(0, 1, 0, 2, 0))
    timeline = schedir.simulate(
        schedir.compile(gpipe_of_all, spread, progress_model="per_edge"),
        Costs(F=1, B=1, send=9),
        progress_model="per_edge",
    )
    events = parse_trace(perfetto.to_json(timeline))
    assert "act out 2" in {e["args"]["name"] for e in events if e["name"] == "thread_name"}


def gpipe_of_all(rank: int, ranks: int, microbatches: int, v: int) -> schedir.RankSchedule:
    stages = v if rank == 0 else 1
    forward = sum((microbatches * schedir.F[j] for j in range(stages)), schedir.EMPTY)
    return sum((microbatches * schedir.B[j] for j in reversed(range(stages))), forward)


def test_program_name_is_escaped() -> None:
    program = replace(schedir.compile(gpipe, PipelineShape(2, 2)), name='</script>"\\é')
    trace = perfetto.to_json(schedir.simulate(program))
    assert json.loads(trace)["otherData"]["program"] == program.name
    assert trace.isascii()


def test_too_long_run_is_refused() -> None:
    timeline = schedir.simulate(schedir.compile(gpipe, PipelineShape(2, 2)), Costs(F=1e200))
    with pytest.raises(UsageError, match="the limit of Perfetto"):
        perfetto.to_json(timeline)


def test_export_command_writes_json_and_gzip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    export = ("export", "one_f_one_b", "--to=perfetto", "-o")
    assert run_command(capsys, *export, "x.json") == "wrote x.json\n"
    events = parse_trace(Path("x.json").read_text())
    assert run_command(capsys, *export, "x.json.gz") == "wrote x.json.gz\n"
    assert parse_trace(gzip.decompress(Path("x.json.gz").read_bytes()).decode()) == events
    monkeypatch.setattr("schedir.commands.export.COMPRESS_ABOVE_BYTES", 1000)
    assert run_command(capsys, *export, "large.json") == "wrote large.json.gz\n"
    assert not Path("large.json").exists()
    assert "must end in .json" in run_refused_command(capsys, *export, "x.csv")
    assert "perfetto" in run_refused_command(
        capsys, "export", "gpipe", "--to", "chrome", "-o", "x.json"
    )
