"""Tests of Hugging Face's GPT-2 and Llama in stages, under `schedir.torch_pipelining.Schedule`.

Losses and gradients have the bits of one process, except the gradient of the tied weight, whose
terms are added in another order.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from typing import Any, NamedTuple, get_args

import pytest
import torch

import schedir
from schedir import B, F, I, RankSchedule, W, schedules
from schedir.torch_pipelining import Schedule
from schedir.torch_pipelining.schedule import Runtime
from schedir.transports.local_processes import run_processes
from tests.cpu.huggingface_models import (
    MICROBATCHES,
    RANKS,
    TIED,
    Left,
    Pipeline,
    Whole,
    in_example,
    loss_fn,
    stage_class,
    whole,
)

transformers = pytest.importorskip("transformers")


def weights_in_pairs(rank: int, ranks: int, microbatches: int) -> Iterator[RankSchedule]:
    """Yield 1F1B with split backwards, where W come two at a time."""
    lead = min(ranks - 1 - rank, microbatches)
    yield lead * F
    for mb in range(microbatches):
        yield (lead + mb < microbatches) * F + I + mb % 2 * 2 * W
    yield microbatches % 2 * W


def there_and_back(rank: int, ranks: int, microbatches: int, v: int) -> RankSchedule:
    """Return all forwards stage by stage, and then all backwards, for any placement."""
    forwards = sum((microbatches * F[j] for j in range(v)), 0 * F)
    return forwards + sum((microbatches * B[j] for j in reversed(range(v))), 0 * F)


class Case(NamedTuple):
    """A schedule, and the stages of each rank."""

    schedule: Any
    holds: tuple[tuple[int, ...], ...]

    @property
    def stages(self) -> int:
        return sum(map(len, self.holds))


ONE = ((0,), (1,), (2,), (3,))
LOOP = ((0, 4), (1, 5), (2, 6), (3, 7))
VEE = ((0, 7), (1, 6), (2, 5), (3, 4))
CASES = {
    "1F1B": Case(schedules.one_f_one_b, ONE),
    "interleaved": Case(schedules.interleaved, LOOP),
    "ZB-H1": Case(schedules.zb_h1, ONE),
    "ZB-V": Case(schedules.zb_v, VEE),
    "DualPipeV": Case(schedules.dualpipe_v, VEE),
    "one's own": Case(weights_in_pairs, ONE),
    "one's own, elsewhere": Case(there_and_back, ((0, 6), (2, 4), (1, 7), (3, 5))),
}
KINDS = tuple(TIED)
# GPT-2 runs all schedules, and each other model runs one with split and one with whole backwards.
NAMES = {"gpt2": tuple(CASES), "llama": ("ZB-V", "1F1B"), "keywords": ("ZB-V", "interleaved")}
HOWS = ("theirs", *get_args(Runtime))
ALL: list[tuple[str, Runtime]] = [(kind, how) for kind in KINDS for how in get_args(Runtime)]
Key = tuple[str, str, str, str]


def everything(rank: int) -> dict[Key, Left]:
    """Return a rank's results of each case: a step, `eval`, and another step."""
    left: dict[Key, Left] = {}
    for kind, runtime in ALL:
        for name in NAMES[kind]:
            pipeline = built(rank, kind, runtime, CASES[name])
            left[kind, runtime, name, "step"] = pipeline.run(by_hand=False)
            if name == "ZB-V":
                left[kind, runtime, name, "eval"] = pipeline.run("eval")
                left[kind, runtime, name, "again"] = pipeline.run(by_hand=False)
        if kind == "gpt2":
            pipeline = built(rank, kind, runtime, CASES["1F1B"], allow_identical_stages=True)
            left[kind, runtime, "1F1B", "by hand"] = pipeline.run()
    return left


def built(rank: int, kind: str, runtime: Runtime, case: Case, **options: Any) -> Pipeline:
    model = whole(kind).model
    stages = [stage_class(kind)(model, s, case.stages) for s in range(case.stages)]
    if not options:
        options["tied_weights"] = schedir.find_tied_weights(stages)
    return Pipeline(
        kind, case.holds[rank], case.stages,
        lambda held: Schedule(
            held, n_microbatches=MICROBATCHES, loss_fn=loss_fn, schedule=case.schedule,
            runtime=runtime, **options,
        ),
    )  # fmt: skip


@pytest.fixture(scope="module")
def left() -> list[dict[Key, Left]]:
    """Run all cases in processes that start once and have the imports of this process."""
    for kind in KINDS:
        whole(kind), stage_class(kind)
    return run_processes(
        everything, RANKS, context=multiprocessing.get_context("fork"), timeout=240
    )


@pytest.mark.parametrize(
    ("kind", "runtime", "name"), [(*one, name) for one in ALL for name in NAMES[one[0]]]
)
def test_gradients_and_losses_of_one_process(
    left: list[dict[Key, Left]], kind: str, runtime: Runtime, name: str
) -> None:
    due = whole(kind)
    for what in ("step", "again", "by hand"):
        ranks = [
            each[kind, runtime, name, what] for each in left if (kind, runtime, name, what) in each
        ]
        if not ranks:
            continue
        assert {n for one in ranks for n in one.off} == {*due.due}
        for one in ranks:
            assert one.same >= one.off.keys() - {TIED[kind]}, what
            assert one.off.get(TIED[kind], 0) < 1e-6, what
        losses_and_logits_are_due(ranks, due)


@pytest.mark.parametrize(("kind", "runtime"), ALL)
def test_eval(left: list[dict[Key, Left]], kind: str, runtime: Runtime) -> None:
    """Between two steps, `eval` returns losses and outputs, and leaves no gradients."""
    ranks = [each[kind, runtime, "ZB-V", "eval"] for each in left]
    assert not any(one.off for one in ranks)
    losses_and_logits_are_due(ranks, whole(kind))


def losses_and_logits_are_due(ranks: list[Left], due: Whole) -> None:
    """Assert that only the rank of the last stage has losses and logits, and that they match."""
    ((losses, logits),) = [(one.losses, one.logits) for one in ranks if one.logits is not None]
    assert losses is not None and torch.equal(losses, due.losses)
    assert torch.equal(logits, due.logits)


def printed(rank: int, how: str) -> str:
    """Return the output of a rank of the example."""
    with redirect_stdout(StringIO()) as out:
        in_example("main")(rank, how)
    return out.getvalue()


def test_the_example_prints_what_torchs_schedule_does() -> None:
    in_example("main")
    context = multiprocessing.get_context("fork")
    ranks = [
        [*map(str.splitlines, run_processes(printed, RANKS, how, context=context))] for how in HOWS
    ]
    for _, *middle, last in ranks:
        assert not any(middle) and last == ranks[0][-1]
    losses = [float(line.split()[-1]) for line in ranks[0][-1]]
    assert len(losses) == 5 and losses[-1] < losses[0] - 0.3
