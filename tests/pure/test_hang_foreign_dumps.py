"""Tests that dumps of another program are refused, even if some of their counts match."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from schedir import PipelineShape, compile, schedules
from schedir.analysis.dependency_graph import Graph
from schedir.errors import UsageError
from schedir.hang_diagnosis.program_matching import match_program
from tests.flight_recorder_dumps import (
    Layout,
    layout_with_group_per_edge,
    layout_with_one_group,
    record,
    stop_at,
    write_and_read_dumps,
)


@pytest.mark.parametrize("layout", [layout_with_one_group, layout_with_group_per_edge])
def test_too_many_messages_for_program_are_refused(
    tmp_path: Path, layout: Callable[[Sequence[int]], Layout]
) -> None:
    """Each process group alone would match: six activations are one and a half steps of four."""
    graph = Graph(compile(schedules.gpipe, PipelineShape(2, 8)), "per_edge", blocking_hosts=True)
    stop = next(k for k in range(len(graph)) if str(graph.index.locate(k)[2]) == "F 1.6")
    job = write_and_read_dumps(
        tmp_path, record(stop_at(graph, stop, True), layout=layout(range(2)))
    )
    with pytest.raises(UsageError) as caught:
        match_program(job, compile(schedules.gpipe, PipelineShape(2, 4)))
    assert "messages of the previous step" in caught.value.fact or layout is layout_with_one_group


def test_two_messages_per_boundary_are_refused(tmp_path: Path) -> None:
    """With two messages per boundary, sequence numbers do not identify a message."""
    program = compile(schedules.gpipe, PipelineShape(3, 4))
    graph = Graph(program, "per_edge", blocking_hosts=True)
    stop = next(k for k in range(len(program)) if str(graph.index.locate(k)[2]) == "F 0.2")
    recorders = record(stop_at(graph, stop, True))
    for recorder in recorders:
        doubled = [dict(entry) for entry in recorder.entries for _ in range(2)]
        recorder.entries = [entry | {"record_id": k} for k, entry in enumerate(doubled)]
    with pytest.raises(UsageError) as caught:
        match_program(write_and_read_dumps(tmp_path, recorders), program)
    assert "messages of the previous step" in caught.value.fact


def test_integer_messages_alone_do_not_match_program(tmp_path: Path) -> None:
    program = compile(schedules.gpipe, PipelineShape(2, 4))
    recorders = record(stop_at(Graph(program), None, False))
    for recorder in recorders:
        recorder.entries = [entry | {"input_dtypes": ["Byte"]} for entry in recorder.entries]
    with pytest.raises(UsageError) as caught:
        match_program(write_and_read_dumps(tmp_path, recorders), program)
    assert "a program. Each has an integer dtype or at most one element" in caught.value.fact
