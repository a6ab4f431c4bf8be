"""Predict three schedules, train one of them, and compare its loss with a single process.

    python examples/demo.py [FOLDER]

The script writes its results to FOLDER, by default ./demo-output, and replaces results of an
earlier run. The exit code is 0 if the loss falls and equals the loss of the single process.
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
ALONE = {"pipeline.ranks": 1, "pipeline.stages_per_rank": 1, "pipeline.tp": 1}
STEPS, LIMIT = 20, 1e-4  # losses of the first STEPS steps may differ by this relative amount
SAY = Console(highlight=False)


def predict(folder: Path) -> None:
    """Compile, check, predict and draw three schedules of one model."""
    SAY.rule("Three schedules on 4 ranks with 8 microbatches, predicted")
    table = Table("schedule", "v", "span", "bubble", "of busy time", "peak in flight by rank")
    timelines = []
    for schedule, v in ((gpipe, 1), (one_f_one_b, 1), (interleaved, 2)):
        # All stages of a rank together take 1 for a forward and 2 for a backward.
        costs = Costs(F=1 / v, B=2 / v)
        shape = PipelineShape(ranks=4, microbatches=8, stages_per_rank=v)
        program = schedir.compile(schedule, shape, costs=costs)  # also proves the program
        timeline = schedir.simulate(program, costs)
        timelines.append(timeline)
        table.add_row(
            program.name,
            str(v),
            f"{timeline.span:g}",
            f"{timeline.bubble:.1%}",
            f"{timeline.bubble_over_ideal:.1%}",
            " ".join(f"{peak / v:g}" for peak in timeline.peak_in_flight),
        )
    SAY.print(table)
    SAY.print("All are complete, in order and free of deadlock.  v is stages per rank;")
    SAY.print("in flight is of how many microbatches a rank keeps activations at most.\n")
    schedir.viz.save(schedir.viz.compare(timelines), folder / "predicted.png")


def train(title: str, folder: Path, settings: dict[str, int]) -> list[float]:
    """Train with the settings of demo.toml, changed by `settings`. Return the loss of each step."""
    SAY.rule(title)
    began = perf_counter()
    sets = [f"{key}={value}" for key, value in settings.items()] + ["output.overwrite=true"]
    code = run(str(CONFIG), [*sets, f"output.dir={json.dumps(str(folder))}"])
    if code:
        sys.exit(code)
    SAY.print(f"{perf_counter() - began:.0f} s\n")
    with (folder / "loss.csv").open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def judge(many: list[float], one: list[float]) -> list[str]:
    """Print the losses side by side, and return a text for each error in them."""
    SAY.rule("Loss")
    apart = [abs(a - b) / abs(b) for a, b in zip(many, one, strict=True)]
    table = Table("step", "4 processes", "1 process", "relative difference")
    for step in (0, *range(4, len(one), 5)):
        table.add_row(str(step + 1), f"{many[step]:.6f}", f"{one[step]:.6f}", f"{apart[step]:.1e}")
    SAY.print(table)
    largest = max(apart[:STEPS])
    SAY.print(f"Largest difference over the first {STEPS} steps: {largest:.1e} (at most {LIMIT:g})")
    wrong = []
    if not largest <= LIMIT:
        wrong.append("the losses differ")
    if not many[-1] < 0.8 * many[0]:
        wrong.append("the loss does not fall")
    return wrong


def main() -> int:
    folder = Path(*sys.argv[1:2] or ["demo-output"])
    began = perf_counter()
    try:
        make_directory(str(folder))
        predict(folder)
        many = train(
            "Interleaved 1F1B: 2 pipeline ranks x 2 tensor-parallel ranks, 4 processes",
            folder / "four-processes",
            {},
        )
        one = train("The same model in one process", folder / "one-process", ALONE)
    except SchedirError as error:
        SAY.print(str(error), style="bold red", markup=False)
        return 2
    wrong = judge(many, one)
    summary = json.loads((folder / "four-processes" / "summary.json").read_text())
    bubble, seconds = summary["bubble"], summary["seconds"]
    SAY.print(
        f"Bubble of the last step: measured {bubble['measured']:.1%} of "
        f"{1e3 * seconds['measured']:.0f} ms, predicted {bubble['predicted']:.1%} of "
        f"{1e3 * seconds['predicted']:.0f} ms from its mean times",
        soft_wrap=True,
    )
    SAY.print(f"Gantt charts: {folder / 'predicted.png'}")
    SAY.print(f"              {folder / 'four-processes' / 'timeline.png'} (predicted, measured)")
    for fact in wrong:
        SAY.print(f"FAILED: {fact}", style="bold red")
    SAY.print(f"{perf_counter() - began:.0f} s in all")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
