"""The data of the interactive page: runs as packed columns of numbers, and their tables."""

from __future__ import annotations

import zlib
from base64 import b64encode
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from schedir.errors import UsageError, format_bytes
from schedir.ir.isa.instructions import COMPUTE_OPS, INSTRUCTIONS, SEND_OPS, Lane, PeerRule
from schedir.predict.bubble_causes import IdleCause, idleness
from schedir.predict.timeline import Timeline, require_timeline
from schedir.viz.palette import (
    DARK_PALETTE,
    HATCHED_OPS,
    LANE_NAMES,
    LIGHT_PALETTE,
    OP_NAMES,
    UNSHARDED_LABEL,
    Palette,
    choose_box_color,
    choose_text_color,
    choose_unsharded_shade,
    format_hex,
)
from schedir.viz.time_bins import (
    compute_in_flight_curve,
    compute_memory_curve,
    compute_tier_curves,
    find_unsharded_intervals,
    list_lower_tiers,
)

_TICKS_PER_SPAN: Final = 2**31 - 1  # The page's times are integers in ticks of span / this number.
# The largest number of shades for the stages of a rank, equal to SHADES in data.js. With more
# stages, several stages of a rank have the same shade.
_MAX_SHADES: Final = 8


def describe_runs(runs: Sequence[Timeline], *, compression: int = 9) -> dict[str, Any]:
    """Return the data of one or two runs for the scripts of the page.

    Args:
        runs: The runs. If their units differ, the second is scaled as in `compare`.
        compression: The level of zlib, from 0 to 9.

    Raises:
        UsageError: The runs have different numbers of ranks.
    """
    for run, name in zip(runs, ("timeline", "other"), strict=False):
        require_timeline(run, name)
    if len({run.ranks for run in runs}) > 1:
        a, b = (run.ranks for run in runs)
        raise UsageError(
            "a page shows only runs with the same number of ranks, but one run has "
            f"{a} ranks and the other {b}"
        )
    labels = label_runs(runs)
    return {
        "ops": [_describe_opcode(row) for row in INSTRUCTIONS],
        "lanes": [lane.name.lower() for lane in Lane],
        "causes": [cause.text for cause in IdleCause],
        **_describe_colors(
            min(max(run.program.shape.stages_per_rank for run in runs), _MAX_SHADES)
        ),
        "runs": [
            _describe_run_data(run, label, runs[0], compression)
            for run, label in zip(runs, labels, strict=True)
        ],
    }


def describe_texts(runs: Sequence[Timeline]) -> dict[str, Any]:
    """Return the texts of the page of one or two runs: its title, its summary and its tables.

    Args:
        runs: The runs.
    """
    return {
        "title": " / ".join(dict.fromkeys(run.program.name for run in runs)),
        "summary": "\n".join(map(_describe_run, runs)),
        "tables": [
            _build_table(run, label) for run, label in zip(runs, label_runs(runs), strict=True)
        ],
    }


def _describe_run(timeline: Timeline) -> str:
    """Describe a run in a few sentences, for people who cannot see the picture of the page.

    Args:
        timeline: The run.

    Returns:
        The shape, the span, the idle shares, and the peaks of activations and memory.
    """
    shape, name = timeline.program.shape, timeline.program.name
    unit = timeline.unit or "units of cost"
    idle_shares = timeline.idle / timeline.span if timeline.span else timeline.idle
    idlest = int(idle_shares.argmax())
    busiest = int(idle_shares.argmin())
    lowest = float(idle_shares[busiest])
    highest = float(idle_shares[idlest])
    spread = f"from {lowest:.1%} on rank {busiest} to {highest:.1%} on rank {idlest}"
    if highest - lowest < 1e-3:
        spread = "the same on each rank"
    peak = timeline.peak_in_flight
    return (
        f"{name}, {timeline.caption}: {shape.ranks} ranks, {shape.stages} stages, "
        f"{shape.microbatches} microbatches, {len(timeline)} instructions in "
        f"{timeline.span:.6g} {unit}. Ranks are idle {timeline.bubble:.1%} of the time, {spread}. "
        f"Rank {int(peak.argmax())} has the most in flight, {int(peak.max())}."
    ) + (f" No rank uses more than {format_bytes(_find_peak_memory(timeline))}"
         f"{_describe_lower_tiers(timeline)}."
         if timeline.sizes else "")  # fmt: skip


def _describe_lower_tiers(timeline: Timeline) -> str:
    """Return the peak memory on each tier below the device, in words."""
    largest = {tier: float(peaks.max()) for tier, peaks in _find_lower_tier_peaks(timeline).items()}
    return "".join(f", and {format_bytes(size)} on its {tier}" for tier, size in largest.items())


def _find_lower_tier_peaks(timeline: Timeline) -> dict[str, NDArray[np.float64]]:
    """Return the peak bytes of each rank on each tier below the device, by tier."""
    return {
        tier: np.array([curve.total.max(initial=0.0) for curve in timeline.memory_on(tier)])
        for tier in list_lower_tiers(timeline)
    }


def _find_peak_memory(timeline: Timeline) -> float:
    return float(timeline.peak_memory.max(initial=0.0))


def _build_table(run: Timeline, label: str) -> dict[str, Any]:
    """Return the table of the ranks of a run: its caption, its headings and its rows of text.

    Args:
        run: The run.
        label: The label of the run on its page.
    """
    share = run.idle / run.span if run.span else run.idle
    columns = {
        "busy": [f"{busy:.5g}" for busy in run.busy],
        "idle": [f"{idle:.1%}" for idle in share],
        "peak in flight": [str(peak) for peak in run.peak_in_flight],
    }
    if run.sizes:
        tier_peaks = {
            f"peak on {tier}": peaks for tier, peaks in _find_lower_tier_peaks(run).items()
        }
        sizes = {"peak memory": run.peak_memory} | tier_peaks | run.static_memory
        columns |= {
            name: [format_bytes(size) for size in rank_sizes] for name, rank_sizes in sizes.items()
        }
    unit = [f"times in {run.unit}"] if run.unit else []
    return {
        "caption": ", ".join(dict.fromkeys([run.program.name, run.kind, label, *unit])),
        "headings": ["rank", *columns],
        "rows": [
            [str(rank), *cells] for rank, cells in enumerate(zip(*columns.values(), strict=True))
        ],
    }


def label_runs(runs: Sequence[Timeline]) -> list[str]:
    """Return labels that distinguish the runs: kinds, else program names, else "first", "second".

    Args:
        runs: The runs of a page.
    """
    for label in ([run.kind for run in runs], [run.program.name for run in runs]):
        if len(set(label)) == len(runs):
            return [str(name) for name in label]
    return ["first", "second"]


def _describe_opcode(row: Any) -> dict[str, Any]:
    label = OP_NAMES.get(row.op, "").removeprefix(f"{row.text} ")
    if row.peer in (PeerRule.NEXT, PeerRule.PREVIOUS):
        label = f"{LANE_NAMES[row.lane]} {'out' if row.op in SEND_OPS else 'in'}"
    return {
        "text": row.text,
        "name": row.op.name,
        "label": label or row.text.replace("_", " "),
        "lane": int(row.lane),
        "scope": row.scope.value or "rank",
        "hasPeer": row.peer is not None,
        "isCompute": row.op in COMPUTE_OPS,
        "isHatched": row.op in HATCHED_OPS,
        "isSend": row.op in SEND_OPS,
    }


@cache  # The studio asks for the same colours again and again.
def _describe_colors(shades: int) -> dict[str, Any]:
    """Return the colours of both themes for a number of shades. Do not change the result."""
    palettes = {"light": LIGHT_PALETTE, "dark": DARK_PALETTE}
    return {
        "fills": {name: _color_instructions(shades, p) for name, p in palettes.items()},
        "unshardedStages": {
            "name": UNSHARDED_LABEL,
            **{
                name: [format_hex(choose_unsharded_shade(k, shades, p)) for k in range(shades)]
                for name, p in palettes.items()
            },
        },
    }


def _color_instructions(shades: int, palette: Palette) -> list[list[tuple[str, str]]]:
    """Return the colours of a box and of its label, by opcode and local stage."""
    fills = []
    for row in INSTRUCTIONS:
        colours = [
            format_hex(choose_box_color(row.op, k, shades, palette))
            for k in range(shades if row.op in COMPUTE_OPS else 1)
        ]
        fills.append([(fill, choose_text_color(fill)) for fill in colours])
    return fills


def _describe_run_data(
    run: Timeline, label: str, reference: Timeline, compression: int
) -> dict[str, Any]:
    """Return the data of a run for the page's script."""
    shape = run.program.shape
    tick = run.span / _TICKS_PER_SPAN or 1.0
    columns, curves = _collect_columns(run, tick)
    idle = idleness(run)
    columns |= {
        "gapStart": _encode_deltas(_to_ticks(idle["start"], run, tick)).astype("<u4"),
        "gapEnd": _encode_deltas(_to_ticks(idle["end"], run, tick)).astype("<u4"),
        "gapCause": idle["cause"].astype("u1"),
        "gapAwaited": idle["awaited_span"].astype("<i4"),
    }
    scale = 1.0
    if run.unit != reference.unit and run.busy.mean() and reference.busy.mean():
        scale = float(reference.busy.mean() / run.busy.mean())
    packed, layout = _pack_columns(columns, compression)
    return {
        "label": label,
        "unit": run.unit,
        "digest": run.program.digest,
        "ranks": run.ranks,
        "count": len(run),
        "offsets": run.program.offsets.tolist(),
        "stagesOnRank": shape.stages_on_rank,
        "stagesPerRank": shape.stages_per_rank,
        "causalityWarning": run.causality_warning,
        "span": run.span,
        "tick": tick,
        "scale": scale,
        "bubble": run.bubble,
        "idle": (run.idle / (run.span or 1.0)).tolist(),
        "peakInFlight": run.peak_in_flight.tolist(),
        "peakMemory": format_bytes(_find_peak_memory(run)) if run.sizes else "",
        "curves": curves,
        "bandRows": find_unsharded_intervals(run).row_count,
        "gapOffsets": np.searchsorted(idle["rank"], np.arange(run.ranks + 1)).tolist(),
        "columns": layout,
        "packedColumns": packed,
    }


def _collect_columns(
    run: Timeline, tick: float
) -> tuple[dict[str, NDArray[Any]], list[dict[str, Any]]]:
    """Return columns of numbers by name, and descriptions of the curves."""
    spans, graph = run.spans, run.graph
    starts = _to_ticks(spans["start"], run, tick)
    ends = _to_ticks(spans["end"], run, tick)
    half = np.zeros(len(run), np.uint8)
    is_second = run.is_second_of_pair
    half[is_second] = 2
    half[np.flatnonzero(is_second) - 1] = 1
    columns: dict[str, NDArray[Any]] = {
        "op": spans["op"].astype("u1"),
        "half": half,
        "stage": spans["stage"].astype("<u2"),
        "mb": _encode_deltas(spans["mb"]).astype("<i4"),
        "start": _encode_deltas(starts).astype("<u4"),
        "length": (ends - starts).astype("<u4"),
    }
    positions_by_name: dict[str, NDArray[Any]] = {
        "criticalPredecessor": run.critical_predecessor,
        "partner": graph.partner,
    }
    positions_by_name |= {f"need{k}": giver for k, giver in enumerate(graph.needs)}
    for name, positions in positions_by_name.items():
        columns[name] = np.where(positions < 0, 0, positions - np.arange(len(run))).astype("<i4")
    bands = find_unsharded_intervals(run)
    columns |= {
        "bandRank": bands.rank.astype("<u2"),
        "bandRow": bands.row.astype("<u2"),
        "bandLocalStage": bands.local_stage.astype("<u2"),
        "bandStart": _encode_deltas(_to_ticks(bands.start + run.start_time, run, tick)).astype(
            "<u4"
        ),
        "bandEnd": _encode_deltas(_to_ticks(bands.end + run.start_time, run, tick)).astype("<u4"),
    }
    curves = []
    memory_curves = [compute_in_flight_curve(run)] + (
        [compute_memory_curve(run), *compute_tier_curves(run)] if run.sizes is not None else []
    )
    for c, (name, unit, steps, _) in enumerate(memory_curves):
        times = [_to_ticks(t + run.start_time, run, tick) for t, _ in steps]
        columns[f"times{c}"] = np.concatenate([_encode_deltas(t) for t in times]).astype("<u4")
        columns[f"values{c}"] = np.concatenate([values for _, values in steps]).astype("<f4")
        offsets = np.cumsum([0, *map(len, times)]).tolist()
        curves.append({"name": name, "unit": unit, "offsets": offsets})
    return columns, curves


def _to_ticks(times: NDArray[np.float64], run: Timeline, tick: float) -> NDArray[np.int64]:
    return np.rint((times - run.start_time) / tick).astype(np.int64)


def _encode_deltas(values: NDArray[Any]) -> NDArray[np.int64]:
    """Return the first value, and then the differences of successive values.

    The differences are small, so they compress well.
    """
    changes: NDArray[np.int64] = values.astype(np.int64)
    changes[1:] -= changes[:-1].copy()
    return changes


def _pack_columns(
    columns: dict[str, NDArray[Any]], compression: int
) -> tuple[str, dict[str, tuple[str, int, int]]]:
    """Return all columns as one base64 text, and (dtype, byte offset, entries) of each by name."""
    layout, parts, offset = {}, [], 0
    for name, column in columns.items():
        layout[name] = (column.dtype.str[1:], offset, len(column))
        parts.append(column.tobytes().ljust(-(-column.nbytes // 8) * 8, b"\0"))
        offset += len(parts[-1])
    return b64encode(zlib.compress(b"".join(parts), compression)).decode(), layout
