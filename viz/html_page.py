"""The interactive page: one self-contained HTML file.

The page is the files in `page/`, put together; runs travel as packed columns of numbers.
"""

from __future__ import annotations

import json
import zlib
from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from schedir.errors import UsageError, format_bytes
from schedir.io.files import atomic_write
from schedir.ir.isa.instructions import COMPUTE, ROWS, SENDS, Lane, PeerRule
from schedir.predict.bubble_causes import IdleCause, idleness
from schedir.predict.timeline import Timeline, expect_runs
from schedir.viz.palette import (
    CAUSES,
    DAY,
    HATCHED,
    LANE_NAMES,
    NAMES,
    NIGHT,
    WHOLE,
    Palette,
    colour,
    ink,
    whole_shade,
    written,
)
from schedir.viz.time_bins import below, in_flight, lower_tiers, memory, whole

_SCRIPTS: Final = ("data.js", "relations.js", "scene.js", "paint.js", "words.js", "main.js")
_TICKS: Final = 2**31 - 1  # of a run's span: times are whole numbers of it over so many
_MOST_SHADES: Final = 8  # as SHADES in data.js: stages of a rank beyond these begin again


def html(timeline: Timeline, other: Timeline | None = None) -> str:
    """The HTML page of a run, or of two of the same ranks, between which it switches.

    It opens offline and asks the network for nothing: its Content-Security-Policy forbids all
    but its own style and script, by their hashes.  Equal runs make equal pages.  Of two runs
    in different units, the second is scaled so that the mean busy time of a rank is equally
    long in both, as `compare` does.

    Raises UsageError for two runs of different numbers of ranks.

    >>> import schedir
    >>> run = schedir.simulate(schedir.compile(schedir.schedules.gpipe,
    ...     schedir.PipelineShape(2, 4)))
    >>> schedir.viz.html(run).splitlines()[0]
    '<!doctype html>'
    """
    runs = [timeline] if other is None else [timeline, other]
    expect_runs(runs)
    if len({run.ranks for run in runs}) > 1:
        a, b = (run.ranks for run in runs)
        raise UsageError(f"a page shows two runs of the same ranks: one has {a}, the other {b}")
    labels, several = _labels(runs), _shades(runs)
    data = {
        "ops": [_op(row) for row in ROWS],
        "lanes": [lane.name.lower() for lane in Lane],
        "causes": [CAUSES[cause][0] for cause in IdleCause],
        "fills": {"light": _fills(runs, DAY), "dark": _fills(runs, NIGHT)},
        "whole": {"name": WHOLE, "light": _wholes(several, DAY), "dark": _wholes(several, NIGHT)},
        "runs": [_run(run, label, runs[0]) for run, label in zip(runs, labels, strict=True)],
    }
    folder = files("schedir.viz") / "page"
    style = (folder / "page.css").read_text(encoding="utf-8")
    parts = "\n".join((folder / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    script = f'(() => {{\n"use strict";\n{parts}}})();\n'
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return Template((folder / "page.html").read_text(encoding="utf-8")).substitute(
        policy=policy,
        title=escape(" / ".join(dict.fromkeys(run.program.name for run in runs))),
        style=style,
        summary=escape("\n".join(map(in_words, runs))),
        tables="".join(_table(run, label) for run, label in zip(runs, labels, strict=True)),
        data=_json(data),
        script=script,
    )


def save_html(path: str | Path, timeline: Timeline, other: Timeline | None = None) -> None:
    """Write `html` to a file, which appears whole.  Raises UsageError where it cannot.

    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> import schedir
    >>> run = schedir.simulate(schedir.compile(schedir.schedules.gpipe,
    ...     schedir.PipelineShape(2, 4)))
    >>> with TemporaryDirectory() as folder:
    ...     schedir.viz.save_html(f"{folder}/gpipe.html", run)
    ...     print(*[path.name for path in Path(folder).iterdir()])
    gpipe.html
    """
    text = html(timeline, other)
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def in_words(timeline: Timeline) -> str:
    """A run in a few sentences, for who cannot see the picture."""
    shape, name = timeline.program.shape, timeline.program.name
    unit = timeline.unit or "units of cost"
    per_rank = timeline.idle / timeline.span if timeline.span else timeline.idle
    idlest, busiest = int(per_rank.argmax()), int(per_rank.argmin())
    least, most = float(per_rank[busiest]), float(per_rank[idlest])
    apart = f"from {least:.1%} on rank {busiest} to {most:.1%} on rank {idlest}"
    if most - least < 1e-3:
        apart = "each of them alike"
    peak = timeline.peak_in_flight
    return (
        f"{name}, {timeline.caption}: {shape.ranks} ranks, {shape.stages} stages, "
        f"{shape.microbatches} microbatches, {len(timeline)} instructions in "
        f"{timeline.span:.6g} {unit}. Ranks are idle {timeline.bubble:.1%} of the time, {apart}. "
        f"Rank {int(peak.argmax())} has the most in flight, {int(peak.max())}."
    ) + (f" No rank holds more than {format_bytes(_most(timeline))}{_below(timeline)}."
         if timeline.sizes else "")  # fmt: skip


def _below(timeline: Timeline) -> str:
    """What is held where else than on the device, in words."""
    most = {tier: float(peaks.max()) for tier, peaks in _peaks_below(timeline).items()}
    return "".join(f", and {format_bytes(size)} on its {tier}" for tier, size in most.items())


def _peaks_below(timeline: Timeline) -> dict[str, NDArray[np.float64]]:
    """Per rank, the most bytes on each tier below the device, by name."""
    return {
        tier: np.array([curve.held.max(initial=0.0) for curve in timeline.memory_on(tier)])
        for tier in lower_tiers(timeline)
    }


def _most(timeline: Timeline) -> float:
    return float(timeline.peak_memory.max(initial=0.0))


def _labels(runs: Sequence[Timeline]) -> list[str]:
    """How runs are told apart: by kind, else by name, else by number."""
    for label in ([run.kind for run in runs], [run.program.name for run in runs]):
        if len(set(label)) == len(runs):
            return [str(name) for name in label]
    return ["first", "second"]


def _op(row: Any) -> dict[str, Any]:
    label = NAMES.get(row.op, "").removeprefix(f"{row.text} ")
    if row.peer in (PeerRule.NEXT, PeerRule.PREVIOUS):
        label = f"{LANE_NAMES[row.lane]} {'out' if row.op in SENDS else 'in'}"
    return {
        "text": row.text,
        "name": row.op.name,
        "label": label or row.text.replace("_", " "),
        "lane": int(row.lane),
        "per": row.per.value or "rank",
        "hop": row.peer is not None,
        "work": row.op in COMPUTE,
        "again": row.op in HATCHED,
        "sends": row.op in SENDS,
    }


def _shades(runs: Sequence[Timeline]) -> int:
    """How many of a rank's own stages are told apart."""
    return min(max(run.program.shape.stages_per_rank for run in runs), _MOST_SHADES)


def _fills(runs: Sequence[Timeline], palette: Palette) -> list[list[tuple[str, str]]]:
    """By opcode and own stage, the colour of a box and of what is written on it."""
    several = _shades(runs)
    fills = []
    for row in ROWS:
        own = [
            written(colour(row.op, k, several, palette))
            for k in range(several if row.op in COMPUTE else 1)
        ]
        fills.append([(fill, ink(fill)) for fill in own])
    return fills


def _wholes(stages: int, palette: Palette) -> list[str]:
    """The colour of each of a rank's own stages while its weights are whole."""
    return [written(whole_shade(k, stages, palette)) for k in range(stages)]


def _run(run: Timeline, label: str, beside: Timeline) -> dict[str, Any]:
    """A run as the page's script reads it."""
    shape = run.program.shape
    tick = run.span / _TICKS or 1.0
    columns, curves = _columns(run, tick)
    idle = idleness(run)
    columns |= {
        "from": _changes(_ticks(idle["start"], run, tick)).astype("<u4"),
        "to": _changes(_ticks(idle["end"], run, tick)).astype("<u4"),
        "cause": idle["cause"].astype("u1"),
        "awaits": idle["awaits"].astype("<i4"),
    }
    scale = 1.0
    if run.unit != beside.unit and run.busy.mean() and beside.busy.mean():
        scale = float(beside.busy.mean() / run.busy.mean())
    packed, layout = _pack(columns)
    return {
        "label": label,
        "unit": run.unit,
        "digest": run.program.digest,
        "ranks": run.ranks,
        "count": len(run),
        "offsets": run.program.offsets.tolist(),
        "own": shape.stages_of,
        "several": shape.stages_per_rank if shape.stages_per_rank > 1 else 0,
        "doubt": run.doubt,
        "span": run.span,
        "tick": tick,
        "scale": scale,
        "bubble": run.bubble,
        "idle": (run.idle / (run.span or 1.0)).tolist(),
        "peak": run.peak_in_flight.tolist(),
        "held": format_bytes(_most(run)) if run.sizes else "",
        "curves": curves,
        "bandRows": whole(run).rows,
        "gapsOf": np.searchsorted(idle["rank"], np.arange(run.ranks + 1)).tolist(),
        "columns": layout,
        "packed": packed,
    }


def _columns(run: Timeline, tick: float) -> tuple[dict[str, NDArray[Any]], list[dict[str, Any]]]:
    """Columns of numbers by name, and which of them are curves."""
    spans, graph = run.spans, run.graph
    starts, ends = _ticks(spans["start"], run, tick), _ticks(spans["end"], run, tick)
    half = np.zeros(len(run), np.uint8)
    second = run.second_of_pair
    half[second] = 2
    half[np.flatnonzero(second) - 1] = 1
    columns: dict[str, NDArray[Any]] = {
        "op": spans["op"].astype("u1"),
        "half": half,
        "stage": spans["stage"].astype("<u2"),
        "mb": _changes(spans["mb"]).astype("<i4"),
        "start": _changes(starts).astype("<u4"),
        "length": (ends - starts).astype("<u4"),
    }
    others: dict[str, NDArray[Any]] = {"latest": run.latest, "partner": graph.partner}
    others |= {f"need{k}": giver for k, giver in enumerate(graph.needs)}
    for name, other in others.items():
        columns[name] = np.where(other < 0, 0, other - np.arange(len(run))).astype("<i4")
    bands = whole(run)
    columns |= {
        "bandRank": bands.rank.astype("<u2"),
        "bandRow": bands.row.astype("<u2"),
        "bandOwn": bands.local.astype("<u2"),
        "bandFrom": _changes(_ticks(bands.start + run.begin, run, tick)).astype("<u4"),
        "bandTo": _changes(_ticks(bands.end + run.begin, run, tick)).astype("<u4"),
    }
    curves = []
    held = [in_flight(run)] + ([memory(run), *below(run)] if run.sizes is not None else [])
    for c, (name, unit, of, _) in enumerate(held):
        times = [_ticks(at + run.begin, run, tick) for at, _ in of]
        columns[f"times{c}"] = np.concatenate([_changes(at) for at in times]).astype("<u4")
        columns[f"values{c}"] = np.concatenate([values for _, values in of]).astype("<f4")
        offsets = np.cumsum([0, *map(len, times)]).tolist()
        curves.append({"name": name, "unit": unit, "offsets": offsets})
    return columns, curves


def _ticks(times: NDArray[np.float64], run: Timeline, tick: float) -> NDArray[np.int64]:
    return np.rint((times - run.begin) / tick).astype(np.int64)


def _changes(values: NDArray[Any]) -> NDArray[np.int64]:
    """Each value less the one before: small numbers, which pack well."""
    changes: NDArray[np.int64] = values.astype(np.int64)
    changes[1:] -= changes[:-1].copy()
    return changes


def _pack(columns: dict[str, NDArray[Any]]) -> tuple[str, dict[str, tuple[str, int, int]]]:
    """All columns in one text, and by name each one's type, first byte and length."""
    layout, parts, at = {}, [], 0
    for name, column in columns.items():
        layout[name] = (column.dtype.str[1:], at, len(column))
        parts.append(column.tobytes().ljust(-(-column.nbytes // 8) * 8, b"\0"))
        at += len(parts[-1])
    return b64encode(zlib.compress(b"".join(parts), 9)).decode(), layout


def _json(data: object) -> str:
    """JSON that no name in it can end: `<` is never written."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def _table(run: Timeline, label: str) -> str:
    share = run.idle / run.span if run.span else run.idle
    columns = {
        "busy": [f"{busy:.5g}" for busy in run.busy],
        "idle": [f"{idle:.1%}" for idle in share],
        "peak in flight": [str(peak) for peak in run.peak_in_flight],
    }
    if run.sizes:
        on = {f"peak on {tier}": peaks for tier, peaks in _peaks_below(run).items()}
        sizes = {"peak memory": run.peak_memory} | on | run.at_rest
        columns |= {name: [format_bytes(held) for held in each] for name, each in sizes.items()}
    head = "".join(f'<th scope="col">{name}</th>' for name in ("rank", *map(escape, columns)))
    rows = "".join(
        f'<tr><th scope="row">{rank}</th>{"".join(f"<td>{cell}</td>" for cell in row)}</tr>'
        for rank, row in enumerate(zip(*columns.values(), strict=True))
    )
    unit = [f"times in {run.unit}"] if run.unit else []
    caption = ", ".join(dict.fromkeys([run.program.name, run.kind, label, *unit]))
    return (
        f"<table><caption>{escape(caption)}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    )


def _hash(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"
