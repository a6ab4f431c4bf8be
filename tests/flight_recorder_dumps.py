"""Write flight recorder dumps of a program that hangs, in torch's documented form.

`stopped` computes how far a program runs under a progress model if an instruction never runs.
`record` and `job_of` write the dumps of the ranks, one file per rank.
"""

from __future__ import annotations

import json
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from schedir.analysis.dependency_graph import Graph
from schedir.hang_diagnosis.flight_recorder import read_dumps
from schedir.hang_diagnosis.wait_graph import DistributedJob
from schedir.ir.instruction_index import NO_POSITION
from schedir.ir.isa.instructions import INSTRUCTIONS, SEND_OPS, TRANSFER_OPS


@dataclass
class State:
    """The state of a run: for each instruction, whether it is issued and whether it has ended."""

    graph: Graph
    issued: list[bool]
    ended: list[bool]


def stop_at(graph: Graph, at: int | None, blocking_hosts: bool, kernels: bool = False) -> State:
    """Return the final state of a run in which the instruction at position `at` never runs.

    A blocking host waits for the inputs of a compute, and does not pass the position. Another host
    issues its complete Stream, or stops at the position if that is a transfer. With `kernels`, a
    transfer waits for all computes that are issued before it, as NCCL's transfers do.
    """
    index, program = graph.index, graph.program
    total = len(index)
    transfer = index.is_op(TRANSFER_OPS).tolist()
    state = State(graph, [False] * total, [False] * total)
    issued, ended = state.issued, state.ended
    first = [k - (~index.joined[: k + 1])[::-1].argmax() for k in range(total)]
    joined = [[k for k in range(total) if first[k] == first[one]] for one in range(total)]
    meets = {k: m.tolist() for m in graph.collective_groups for k in m.tolist()}
    host = [*program.offsets[:-1].tolist()]
    held = graph.host_waits if blocking_hosts else np.full((1, total), NO_POSITION)

    lane = [
        INSTRUCTIONS[op].lane == 0 and not moves
        for op, moves in zip(index.op, transfer, strict=True)
    ]
    owns = index.rank.tolist()
    computes = {r: [k for k in range(total) if lane[k] and owns[k] == r] for r in {*owns}}
    many = [sum(one < k for one in computes[owns[k]]) for k in range(total)]

    def over(positions: Any, but: Sequence[int]) -> bool:
        return all(ended[k] for k in {*positions} - {NO_POSITION, *but})

    def ready(k: int) -> bool:
        """Return whether all predecessors of an instruction and its group have ended."""
        group = joined[k]
        if kernels and transfer[k] and not over(computes[index.rank[k]][: many[k]], ()):
            return False
        return all(
            over(graph.local_waits[:, g].tolist(), group)
            and over([graph.queue_predecessor[g]], group)
            for g in group
        )

    moved = True
    while moved:
        moved = False
        for rank, k in enumerate(host):
            if k == program.offsets[rank + 1]:
                continue
            group = joined[k]
            if at in group and (blocking_hosts or transfer[at or 0]):
                continue
            strict = graph.progress_model == "blocking_serial"
            if not over(held[:, group].reshape(-1).tolist(), group) or (strict and not ready(k)):
                continue
            if (
                blocking_hosts
                and not transfer[k]
                and INSTRUCTIONS[index.op[k]].lane == 0
                and not ready(k)
            ):
                continue
            for one in group:
                issued[one] = True
            host[rank] = group[-1] + 1
            moved = True
        for k in range(total):
            if ended[k] or not issued[k] or not ready(k) or k == at:
                continue
            sides = [k, int(graph.partner[k])] if transfer[k] else meets.get(k, joined[k])
            if all(issued[s] and ready(s) and s != at for s in sides):
                for one in sides:
                    ended[one] = True
                moved = True
    return state


# ---------------------------------------------------------------- as files

Layout = Callable[[int, int, int], tuple[str, tuple[int, ...]]]


def layout_with_one_group(ranks: Sequence[int], name: str = "1") -> Layout:
    """Return a layout with one process group for all messages of a pipeline."""
    return lambda a, b, lane: (name, tuple(ranks))


def layout_with_group_per_edge(ranks: Sequence[int]) -> Layout:
    """Return a layout with a process group for each directed edge and kind of message."""

    def group(a: int, b: int, lane: int) -> tuple[str, tuple[int, ...]]:
        lo, hi = sorted((ranks[a], ranks[b]))
        return f"{ranks[a]}to{ranks[b]}by{lane}", (lo, hi)

    return group


class Recorder:
    """The flight recorder of a rank, with entries and counters as torch has them."""

    def __init__(self, rank: int, backend: str = "nccl") -> None:
        self.rank, self.backend = rank, backend
        self.entries: list[dict[str, Any]] = []
        self.config: dict[str, dict[str, str]] = {}
        self.counts: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
        self.clock = count(1_700_000_000_000_000_000 + rank, 1_000_000)

    def group(self, name: str, ranks: Sequence[int], about: str = "pp") -> None:
        self.config[name] = {"name": name, "desc": about, "ranks": str([*ranks])}

    def _add(
        self, name: str, title: str, state: str, p2p: bool, shape: list[int], dtype: str
    ) -> None:
        counts, created = self.counts[name], next(self.clock)
        over = next(self.clock) if state == "completed" else None
        self.entries.append({
            "frames": [{"name": "step", "filename": "train.py", "line": 7}],
            "record_id": len(self.entries),
            "pg_id": [*self.config].index(name),
            "process_group": (name, self.config[name]["desc"]),
            "thread_name": "python",
            "thread_id": "1",
            "collective_seq_id": counts[0],
            "p2p_seq_id": counts[1],
            "op_id": counts[2],
            "profiling_name": f"{self.backend}:{title}",
            "time_created_ns": created,
            "input_sizes": [shape] if shape else [],
            "input_dtypes": [dtype] if shape else [],
            "output_sizes": [shape] if shape else [],
            "output_dtypes": [dtype] if shape else [],
            "state": state,
            "time_discovered_started_ns": None,
            "time_discovered_completed_ns": over,
            "retired": over is not None,
            "timeout_ms": 600000,
            "is_p2p": p2p,
        })  # fmt: skip

    def messages(
        self,
        name: str,
        sides: Sequence[tuple[str, int]],
        ended: bool,
        *,
        shape: Sequence[int] = (2, 8),
        dtype: str = "Float",
    ) -> None:
        """Record messages of a process group that are issued together. Several are a batch."""
        counts, ranks = self.counts[name], json.loads(self.config[name]["ranks"])
        counts[1] += 1
        state = "completed" if ended else "scheduled"
        for kind, peer in sides:
            counts[2] += 1
            arrow = "->" if kind == "send" else "<-"
            title = f"{kind} {ranks.index(self.rank)}{arrow}{ranks.index(peer)}"
            inner = state if len(sides) == 1 else "scheduled"
            self._add(name, title, inner, True, [*shape], dtype)
        if len(sides) > 1:
            self._add(name, "coalesced", state, True, [], "")

    def collective(self, name: str, title: str, ended: bool, shape: Sequence[int] = (4,)) -> None:
        counts = self.counts[name]
        counts[0] += 1
        counts[2] += 1
        self._add(name, title, "completed" if ended else "scheduled", False, [*shape], "Float")

    def dump(self, last: int | None = None) -> dict[str, Any]:
        """Return the dump, with only the `last` entries if that is given."""
        return {
            "version": "2.10",
            "pg_config": self.config,
            "comm_lib_version": "2.29.3",
            "pg_status": {},
            "entries": self.entries[-last:] if last else self.entries,
        }

    def save(self, folder: Path, last: int | None = None, as_json: bool = False) -> Path:
        path = folder / f"nccl_trace_rank_{self.rank}"
        dump = self.dump(last)
        if as_json:
            path = path.with_suffix(".json")
            dump["entries"] = [
                {k: v or 0 if k.endswith("_ns") else v for k, v in entry.items() if k != "frames"}
                for entry in dump["entries"]
            ]
            path.write_text(json.dumps(dump))
        else:
            path.write_bytes(pickle.dumps(dump, 2))
        return path


def record(
    state: State,
    ranks: Sequence[int] | None = None,
    *,
    before: int = 0,
    layout: Layout | None = None,
) -> list[Recorder]:
    """Return the recorders of all ranks after `before` complete steps and a step in a state."""
    program = state.graph.program
    ranks = ranks or range(program.shape.ranks)
    layout = layout or layout_with_one_group(ranks)
    recorders = [Recorder(rank) for rank in ranks]
    whole = State(state.graph, *(2 * [[True] * len(program)]))
    for own, recorder in enumerate(recorders):
        for one in [whole] * before + [state]:
            for sides, name, members, ended in _issued(one, own, ranks, layout):
                recorder.group(name, members)
                recorder.messages(name, sides, ended)
    return recorders


def _issued(
    state: State, own: int, ranks: Sequence[int], layout: Layout
) -> Iterator[tuple[list[tuple[str, int]], str, tuple[int, ...], bool]]:
    """Yield the issued messages of a rank in the order of its Stream, grouped into batches."""
    graph = state.graph
    index, program = graph.index, graph.program
    lo, hi = program.offsets[own : own + 2].tolist()
    at = lo
    while at < hi:
        end = at + 1
        while end < hi and index.joined[end]:
            end += 1
        batches: dict[tuple[str, tuple[int, ...]], list[int]] = defaultdict(list)
        for k in range(at, end):
            if index.op[k] in TRANSFER_OPS and state.issued[k]:
                there = int(index.rank[graph.partner[k]])
                sends = index.op[k] in SEND_OPS
                ends = (own, there) if sends else (there, own)
                batches[layout(*ends, int(INSTRUCTIONS[index.op[k]].lane))].append(k)
        for (name, members), batch in batches.items():
            sides = [
                (
                    "send" if index.op[k] in SEND_OPS else "recv",
                    ranks[int(index.rank[graph.partner[k]])],
                )
                for k in batch
            ]
            yield sides, name, members, all(state.ended[k] for k in batch)
        at = end


def write_and_read_dumps(
    folder: Path, recorders: Sequence[Recorder], last: int | None = None, as_json: bool = False
) -> DistributedJob:
    """Write the dumps, and return the job that `read_dumps` finds in them."""
    for old in folder.glob("nccl_*"):
        old.unlink()
    for recorder in recorders:
        recorder.save(folder, last, as_json)
    return DistributedJob(read_dumps([str(folder)])[0])
