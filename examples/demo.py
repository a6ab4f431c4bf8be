"""Predict three schedules, train with one of them, and compare its losses with one process.

    python examples/demo.py [FOLDER]

The script writes its results to FOLDER, by default ./demo-output, and replaces results of an
earlier run. The exit code is 0 if the loss falls, and if the losses of both runs are equal up to
rounding.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.table import Table

import schedir
from schedir import Costs, PipelineShape
from schedir.errors import SchedirError
from schedir.schedules import gpipe, interleaved, one_f_one_b
from schedir.training.run_results import make_directory
from schedir.training.train import run

CONFIG = Path(__file__).with_name("demo.toml")
SINGLE_PROCESS = {"pipeline.ranks": 1, "pipeline.stages_per_rank": 1, "pipeline.tp": 1}
# In the first STEPS steps, the losses of both runs may differ by this relative amount.
STEPS, MAX_DIFFERENCE = 20, 1e-4
CONSOLE = Console(highlight=False)


def predict(folder: Path) -> None:
    """Compile, check, predict and draw three schedules of one model."""
    CONSOLE.rule("Three schedules on 4 ranks with 8 microbatches, predicted")
    table = Table("schedule", "v", "span", "bubble", "of busy time", "peak in flight by rank")
    timelines = []
    for schedule, stages_per_rank in ((gpipe, 1), (one_f_one_b, 1), (interleaved, 2)):
        # All stages of a rank together take 1 for a forward and 2 for a backward.
        costs = Costs(F=1 / stages_per_rank, B=2 / stages_per_rank)
        shape = PipelineShape(ranks=4, microbatches=8, stages_per_rank=stages_per_rank)
        program = schedir.compile(schedule, shape, costs=costs)  # also checks the program
        timeline = schedir.simulate(program, costs)
        timelines.append(timeline)
        table.add_row(
            program.name,
            str(stages_per_rank),
            f"{timeline.span:g}",
            f"{timeline.bubble:.1%}",
            f"{timeline.bubble_over_ideal:.1%}",
            " ".join(f"{peak / stages_per_rank:g}" for peak in timeline.peak_in_flight),
        )
    CONSOLE.print(table)
    CONSOLE.print("All are complete, in order and free of deadlock.  v is stages per rank;")
    CONSOLE.print("in flight is of how many microbatches a rank keeps activations at most.\n")
    schedir.viz.save(schedir.viz.compare(timelines), folder / "predicted.png")


def train(title: str, folder: Path, settings: dict[str, int]) -> list[float]:
    """Train with demo.toml, and with `settings` instead of its values. Return each step's loss."""
    CONSOLE.rule(title)
    start = perf_counter()
    set_options = [f"{key}={value}" for key, value in settings.items()] + ["output.overwrite=true"]
    exit_code = run(str(CONFIG), [*set_options, f"output.dir={json.dumps(str(folder))}"])
    if exit_code:
        sys.exit(exit_code)
    CONSOLE.print(f"{perf_counter() - start:.0f} s\n")
    with (folder / "loss.csv").open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def compare_losses(pipeline_losses: list[float], single_losses: list[float]) -> list[str]:
    """Print the losses side by side, and return the failed conditions."""
    CONSOLE.rule("Loss")
    differences = [abs(a - b) / abs(b) for a, b in zip(pipeline_losses, single_losses, strict=True)]
    table = Table("step", "4 processes", "1 process", "relative difference")
    for step in (0, *range(4, len(single_losses), 5)):
        table.add_row(
            str(step + 1),
            f"{pipeline_losses[step]:.6f}",
            f"{single_losses[step]:.6f}",
            f"{differences[step]:.1e}",
        )
    CONSOLE.print(table)
    largest = max(differences[:STEPS])
    CONSOLE.print(
        f"Largest difference over the first {STEPS} steps: {largest:.1e} "
        f"(at most {MAX_DIFFERENCE:g})"
    )
    errors = []
    if not largest <= MAX_DIFFERENCE:
        errors.append("the losses differ")
    if not pipeline_losses[-1] < 0.8 * pipeline_losses[0]:
        errors.append("the loss does not fall")
    return errors


def main() -> int:
    folder = Path(*sys.argv[1:2] or ["demo-output"])
    start = perf_counter()
    try:
        make_directory(str(folder))
        predict(folder)
        pipeline_losses = train(
            "Interleaved 1F1B: 2 pipeline ranks x 2 tensor-parallel ranks, 4 processes",
            folder / "four-processes",
            {},
        )
        single_losses = train(
            "The same model in one process", folder / "one-process", SINGLE_PROCESS
        )
    except SchedirError as error:
        CONSOLE.print(str(error), style="bold red", markup=False)
        return 2
    errors = compare_losses(pipeline_losses, single_losses)
    summary = json.loads((folder / "four-processes" / "summary.json").read_text())
    bubble, seconds = summary["bubble"], summary["seconds"]
    CONSOLE.print(
        f"Bubble of the last step: measured {bubble['measured']:.1%} of "
        f"{1e3 * seconds['measured']:.0f} ms, predicted {bubble['predicted']:.1%} of "
        f"{1e3 * seconds['predicted']:.0f} ms from its mean times",
        soft_wrap=True,
    )
    CONSOLE.print(f"Gantt charts: {folder / 'predicted.png'}")
    CONSOLE.print(
        f"              {folder / 'four-processes' / 'timeline.png'} (predicted, measured)"
    )
    for message in errors:
        CONSOLE.print(f"FAILED: {message}", style="bold red")
    CONSOLE.print(f"{perf_counter() - start:.0f} s in all")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
