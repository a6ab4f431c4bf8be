"""Implement `plan --calibrate`: read measured runs, fit a cluster to them, and report the fit."""

from __future__ import annotations

import csv
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schedir.commands.common.plan_report import format_seconds
from schedir.commands.common.plan_request import resolve_cluster, resolve_model
from schedir.errors import ConfigError, SchedirError, UsageError, format_bytes
from schedir.io.files import atomic_write, read_text
from schedir.io.terminal_output import format_table
from schedir.ir.cost.number_parsing import parse_decimal
from schedir.ir.cost.sizes import parse_bytes
from schedir.retired_names import find_similar_name

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator, Sequence

    from schedir.planner import Calibration, MeasuredRun, TransformerSpec

_MAX_RUNS_BYTES = 2**20
_MAX_MISFITS = 5  # The table of runs has the errors of all runs.
_RESULTS = ("step_time", "tokens_per_second", "memory")
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


def calibrate_cluster(args: argparse.Namespace) -> str:
    """Fit a cluster to measured runs, and write its file.

    Args:
        args: The parsed options of `plan`.

    Returns:
        A report of the fitted constants and the measured runs.

    Raises:
        UsageError: An option is missing or invalid, or the runs cannot be read.
    """
    from schedir.io.cluster_file import save_cluster
    from schedir.planner import calibrate, stack_preset

    if args.output is None or Path(args.output).suffix != ".toml":
        raise UsageError("--calibrate writes a cluster file, and needs -o FILE.toml",
                         hint="-o my_cluster.toml", fields=["output"])  # fmt: skip
    if args.stack is None:
        raise UsageError("--calibrate needs --stack, the training software of the runs",
                         hint="--stack megatron", fields=["stack"])  # fmt: skip
    if args.memory_limit is not None:
        raise UsageError("--calibrate does not plan, and cannot be combined with --memory-limit",
                         fields=["memory_limit"])  # fmt: skip
    model = resolve_model(args)
    cluster = resolve_cluster(args)
    runs = read_runs(args.calibrate, model)
    with atomic_write(args.output) as temporary:  # Fail now if the path cannot be written.
        calibration = calibrate(cluster, stack_preset(args.stack), runs)
        notes = {
            constant.name: f"90 % interval: {constant.low:.3g} to {constant.high:.3g}"
            for constant in calibration.constants
        }
        comment = "\n".join([
            f"Calibrated by schedir plan --calibrate with {len(runs)} runs of {args.stack}.",
            *_describe_misfits(calibration),
        ])  # fmt: skip
        save_cluster(calibration.cluster, temporary, comment=comment, notes=notes)
    return "".join(format_calibration(calibration)) + f"wrote {args.output}\n"


def read_runs(path: str | Path, model: TransformerSpec) -> list[MeasuredRun]:
    """Read measured runs from a CSV file with a header.

    Args:
        path: The file. Its columns are fields of `ParallelPlan`, the result, and optionally
            `memory`. The result is `step_time` in seconds, or `tokens_per_second` of all GPUs.
            `memory` is in bytes or has a unit, and can be empty. Lines that begin with # are
            comments.
        model: The model of all runs.

    Raises:
        ConfigError: A column is unknown or missing, or a value is invalid. The error names the line
            of the file.
        UsageError: The file cannot be read.
    """
    from schedir.planner import MeasuredRun, ParallelPlan

    text = read_text(path, _MAX_RUNS_BYTES)
    lines = [(n, line) for n, line in enumerate(text.splitlines(), 1)
             if line.strip() and not line.startswith("#")]  # fmt: skip
    table = [*csv.reader(line for _, line in lines)]
    header = [name.strip() for name in table[0]] if table else []
    plan_fields = {f.name: f.default for f in fields(ParallelPlan)}
    if repeated := [name for name in header if header.count(name) > 1]:
        raise ConfigError(f"column {repeated[0]} is repeated", location=str(path), line=lines[0][0])
    unknown = [name for name in header if name not in (*plan_fields, *_RESULTS)]
    if unknown or not {"step_time", "tokens_per_second"} & {*header}:
        problem = f"unknown column {unknown[0]}" if unknown else "no column with the results"
        raise ConfigError(
            f"{problem}: the columns must be fields of a plan, step_time (in seconds) or "
            "tokens_per_second (of all GPUs), and optionally memory",
            location=str(path), line=lines[0][0] if lines else 1,
            hint=_suggest_column(unknown, plan_fields),
        )  # fmt: skip
    runs = []
    for (number, _), row in zip(lines[1:], table[1:], strict=True):
        try:
            if len(row) != len(header):
                raise ValueError(
                    f"the line has {len(row)} values, but the header has {len(header)} columns"
                )
            cells = {k: v.strip() for k, v in zip(header, row, strict=True) if v.strip()}
            plan = ParallelPlan(
                **{
                    k: _parse_cell(k, v, plan_fields[k])
                    for k, v in cells.items()
                    if k in plan_fields
                }
            )
            if ("step_time" in cells) == ("tokens_per_second" in cells):
                raise ValueError("the line must have either step_time or tokens_per_second")
            if "step_time" in cells:
                seconds = parse_decimal(cells["step_time"])
            else:
                seconds = plan.batch * model.sequence / parse_decimal(cells["tokens_per_second"])
            memory = _parse_memory(cells["memory"]) if "memory" in cells else None
        except (ValueError, ZeroDivisionError, SchedirError) as error:
            fact = error.fact if isinstance(error, SchedirError) else f"invalid run: {error}"
            raise ConfigError(fact, location=str(path), line=number) from None
        runs.append(MeasuredRun(model, plan, seconds, memory))
    return runs


def _suggest_column(unknown: Sequence[str], plan_fields: Iterable[str]) -> str:
    """Return a hint for a header with unknown columns."""
    example = "pp,tp,dp,microbatch_size,microbatches,step_time"
    if unknown and (separator := next((mark for mark in ";\t" if mark in unknown[0]), "")):
        return f"separate the columns by commas, not by {separator!r}: {example}"
    similar = find_similar_name(unknown[0], [*plan_fields, *_RESULTS]) if unknown else ""
    if similar == "step_time" and unknown[0].endswith("_ms"):
        return "divide the milliseconds by 1000, and name the column step_time"
    return f"did you mean {similar}?" if similar else example


def _parse_memory(text: str) -> float:
    try:
        return parse_bytes(text)
    except ValueError:
        raise ValueError(f"memory must be bytes, such as 7e10 or 70GB, not {text!r}") from None


def _parse_cell(column: str, text: str, default: Any) -> Any:
    """Convert the text of a cell into the type of the default of its field."""
    if isinstance(default, bool):
        if text.lower() not in _BOOLEANS:
            raise ValueError(f"{column} must be true or false, not {text!r}")
        return _BOOLEANS[text.lower()]
    try:
        if isinstance(default, int):
            return int(text)
        return tuple(map(int, text.split())) if isinstance(default, tuple) else text
    except ValueError:
        kind = "an integer" if isinstance(default, int) else "integers with spaces between them"
        raise ValueError(f"{column} must be {kind}, not {text!r}") from None


def _describe_misfits(calibration: Calibration) -> list[str]:
    """Return the lines of a warning about runs that the fit does not reproduce."""
    misfits = calibration.list_misfits()
    if not misfits:
        return []
    return [
        f"warning: the fitted constants do not reproduce {len(misfits)} of "
        f"{len(calibration.runs)} runs:",
        *(f"  {sentence}" for sentence in misfits[:_MAX_MISFITS]),
        *([f"  and {len(misfits) - _MAX_MISFITS} more"] if len(misfits) > _MAX_MISFITS else []),
        "  check the model, the plan, the stack and the step time of these runs; the intervals are "
        "wide because of these errors",
    ]


def format_calibration(calibration: Calibration) -> Iterator[str]:
    """Yield the parts of a report: constants, runs, uncertainty, and the run to measure next.

    Args:
        calibration: The calibration.
    """
    from schedir.planner.bottleneck import describe_plan

    yield format_table(
        ["constant", "before", "fitted", "90 % interval", "meaning"],
        [
            [
                constant.name, f"{constant.prior:.4g}", f"{constant.value:.4g}",
                f"{constant.low:.3g} to {constant.high:.3g}", constant.meaning,
            ]
            for constant in calibration.constants
        ],
    )  # fmt: skip
    yield format_table(
        ["run", "plan", "measured", "predicted", "error", "memory", "predicted"],
        [
            [
                str(k), describe_plan(run.plan), format_seconds(run.step_time),
                format_seconds(estimate.step_time), f"{error:+.1%}",
                "-" if run.memory is None else format_bytes(run.memory),
                format_bytes(estimate.memory.total),
            ]
            for k, (run, estimate, error) in enumerate(
                zip(calibration.runs, calibration.estimates, calibration.errors, strict=True), 1
            )
        ],
    )  # fmt: skip
    yield "".join(f"{line}\n" for line in _describe_misfits(calibration))
    yield (
        f"step times have a standard deviation of {calibration.cluster.uncertainty:.1%}, for plans "
        f"like these runs; plans on more than {calibration.cluster.calibrated_gpus} GPUs are "
        "extrapolations\n"
    )
    if (plan := calibration.suggest_run()) is not None:
        yield (
            f"measure next: pp {plan.pp} tp {plan.tp} dp {plan.dp} microbatch_size "
            f"{plan.microbatch_size}, zero {plan.zero}: its step time is the least certain\n"
        )
