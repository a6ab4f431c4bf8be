"""Models: the loss of each kind in a pipeline, beside a plain loop in one process.

    python benchmarks/models.py [--steps 200] [--csv FILE] [--picture FILE]

Each is trained by `schedir train` on 2 pipeline ranks x 2 tensor-parallel ranks over Gloo, on the
source of Python's standard library; and by a loop of plain torch: the model of one stage, a
backward for each microbatch, torch's clipping and AdamW.  The loop runs a second time with each
number of the weights changed by 1e-7 of itself, more or less: how far that takes the losses apart
is what rounding alone does.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import head, line, parse
from schedir.training.config import Config
from schedir.training.config_file import read
from schedir.training.corpus import Corpus
from schedir.training.models import model_of
from schedir.training.optimizer import optimizer_of

CONFIG: Final = """\
[model]
hidden = 64
heads = 4
context = 64

[pipeline]
ranks = 2
tp = 2
microbatches = 4

[data]
microbatch_size = 4

[train]
lr = 1e-3
min_lr = 1e-4
warmup = 20
log_every = 100000

[output]
record = false
"""
KINDS: Final = {
    "gpt": ("interleaved", ["model.layers=4"]),
    "llama": ("zb_v", ["model.layers=4", "model.kv_heads=2"]),
}


class Curve(NamedTuple):
    """Losses of the steps of a kind of model, in a pipeline and in a plain loop."""

    kind: str
    schedule: str
    pipeline: list[float]
    plain: list[float]
    nudged: list[float]

    def apart(self, other: list[float], steps: int | None = None) -> float:
        """The largest difference to the plain loop of the first steps, over the loss."""
        return max(abs(a - b) / b for a, b in zip(other[:steps], self.plain, strict=False))


def plain(config: Config, nudge: float = 0.0) -> list[float]:
    """The mean losses of a loop over one process's model, its weights changed by a share."""
    torch.set_num_threads(1)
    model, batches = model_of(config.model), Corpus(config).batches
    module: Any = model.module
    whole = module.build_stage(config.model, 0, 1)
    numbers = torch.Generator().manual_seed(1)
    for p in whole.parameters():
        p.data *= 1 + nudge * torch.randn(p.shape, generator=numbers)
    optimizer: Any = optimizer_of([*whole.parameters()], config.train)
    losses = []
    for step in range(config.train.steps):
        inputs, targets = batches.batch(step * batches.size, batches.size)
        count, total, size = module.count_tokens(targets), 0.0, config.data.microbatch_size
        optimizer.zero_grad()
        for x, y in zip(inputs.split(size), targets.split(size), strict=True):
            loss = module.loss(whole(x), y)
            (loss / count).backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(whole.parameters(), config.train.clip or float("inf"))
        for group in optimizer.param_groups:
            group["lr"] = config.train.learning_rate(step)
        optimizer.step()
        losses.append(total / count)
    return losses


def trained(kind: str, steps: int, folder: Path) -> Curve:
    """Both runs of a kind."""
    (file := folder / "config.toml").write_text(CONFIG)
    schedule, sizes = KINDS[kind]
    sets = [f"model.kind={kind}", *sizes, f"pipeline.schedule={schedule}", f"train.steps={steps}",
            f'output.folder="{folder / kind}"']  # fmt: skip
    words = [sys.executable, "-m", "schedir", "train", str(file), *(f"--set={s}" for s in sets)]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    with (folder / kind / "loss.csv").open() as losses:
        pipeline = [float(row["loss"]) for row in csv.DictReader(losses)]
    config = read(str(file), sets)
    return Curve(kind, schedule, pipeline, plain(config), plain(config, 1e-7))


def draw(curves: list[Curve], path: Path) -> None:
    """Loss over steps: pipelines as lines, plain loops as points on them."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "models"
    from matplotlib import pyplot

    figure, (axes,) = pyplot.subplots(
        1, len(curves), figsize=(7, 3.2), layout="constrained", squeeze=False
    )
    for axis, curve in zip(axes, curves, strict=True):
        steps = range(1, len(curve.plain) + 1)
        axis.plot(steps, curve.pipeline, lw=1.6, color="#4477aa", label="2 x 2 processes")
        some = slice(0, None, max(1, len(curve.plain) // 25))
        axis.plot(
            steps[some], curve.plain[some], "o", ms=3.5, mfc="none", color="#cc6677",
            label="a plain loop",
        )  # fmt: skip
        axis.set_title(f"{curve.kind}, {curve.schedule}", fontsize=10)
        axis.set_xlabel("step")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("loss, nats")
    axes[0].legend(frameon=False, fontsize=9)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--kinds", nargs="+", default=[*KINDS], choices=[*KINDS])
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--picture", type=Path)
    args = parse(parser, steps=4, kinds=["gpt"])
    if args.smoke:
        with tempfile.TemporaryDirectory() as folder:
            args.csv, args.picture = Path(folder, "losses.csv"), Path(folder, "losses.svg")
            report(args)
    else:
        report(args)


def report(args: argparse.Namespace) -> None:
    """Train each kind, and print, write and draw its losses."""
    curves = []
    early = args.steps // 4
    head(
        "model", "schedule", "first loss", "last loss", "plain loop's",
        f"apart until step {early}", "nudged loop", f"until step {args.steps}", "nudged loop",
    )  # fmt: skip
    for kind in args.kinds:
        with tempfile.TemporaryDirectory() as folder:
            curve = trained(kind, args.steps, Path(folder))
        curves.append(curve)
        apart = [
            f"{curve.apart(other, steps):.1e}"
            for steps in (early, args.steps)
            for other in (curve.pipeline, curve.nudged)
        ]
        ends = (curve.pipeline[0], curve.pipeline[-1], curve.plain[-1])
        line(kind, curve.schedule, *(f"{loss:.4f}" for loss in ends), *apart)
    if args.csv is not None:
        with args.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["model", "step", "pipeline", "plain", "nudged"])
            for curve in curves:
                rows = zip(curve.pipeline, curve.plain, curve.nudged, strict=True)
                for step, row in enumerate(rows, 1):
                    writer.writerow([curve.kind, step, *(f"{loss:.7f}" for loss in row)])
    if args.picture is not None:
        draw(curves, args.picture)


if __name__ == "__main__":
    main()
