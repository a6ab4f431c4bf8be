"""Torch's lowering with `defer_pp_recv=True`: under which models does what it writes finish?

    python benchmarks/torch_deferred.py

Every multi-stage schedule of the installed torch, at 2 to 8 ranks, is lowered by torch itself, as
usual and with its receives deferred; the CSV that it dumps is read and checked.  Prints a row per
schedule: of how many programs how many finish, under each progress model; then the smallest program
that is refused under `device`, and the refusal.  Nothing runs, and no time is measured.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import parse
from schedir.analysis.models import MODELS, Model
from schedir.compiler.compile import finish
from schedir.errors import DeadlockError
from schedir.io import torch_csv
from schedir.ir.plan import Plan
from schedir.ir.program import Program
from schedir.verify.check import check
from tests.cpu.theirs import LOOP, VEE, lowered

RANKS = (2, 3, 4, 8)


def plans(name: str, most: int) -> Iterator[Plan]:
    """Four shapes for each number of ranks up to `most`."""
    for ranks in RANKS[: RANKS.index(most) + 1]:
        if name in VEE:
            yield from (Plan(ranks, ranks * turns, 2, "vee") for turns in (2, 3, 4, 6))
        else:
            yield from (Plan(ranks, ranks * turns, v) for v in (2, 3) for turns in (1, 2))


def refusal(program: Program, model: Model) -> DeadlockError | None:
    """Why a program does not finish; anything else that is wrong with it is raised."""
    try:
        check(program, model)
    except DeadlockError as error:
        return error
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, choices=RANKS, default=RANKS[-1], help="ranks")
    most = parse(parser, most=RANKS[0]).most
    print(f"torch {torch.__version__}: programs that finish, of those that torch lowered\n")
    print(f"{'schedule':<30}{'receives':<10}{'programs':>9}", *(f"{m:>10}" for m in MODELS), sep="")
    smallest: tuple[int, Program, DeadlockError] | None = None
    total: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}
    for name in LOOP + VEE:
        for defer in (False, True):
            done: Counter[str] = Counter()
            for plan in plans(name, most):
                program = finish(torch_csv.parse(lowered(name, plan, defer_pp_recv=defer)))
                done["all"] += 1
                for model in MODELS:
                    error = refusal(program, model)
                    done[model] += error is None
                    small = smallest is None or len(program) < smallest[0]
                    if error is not None and model == "device" and small:
                        smallest = len(program), program, error
            total[defer] += done
            row(name, defer, done)
    for defer, done in total.items():
        row("all", defer, done)
    if smallest:
        _, program, error = smallest
        print(f"\nthe smallest that is refused under device: {program.plan}\n\n{error}")


def row(name: str, defer: bool, done: Counter[str]) -> None:
    """A line of the table."""
    when = "deferred" if defer else "as usual"
    print(f"{name:<30}{when:<10}{done['all']:>9}", *(f"{done[m]:>10}" for m in MODELS), sep="")


if __name__ == "__main__":
    main()
