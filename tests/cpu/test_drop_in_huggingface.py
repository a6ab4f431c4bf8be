"""Tests of Hugging Face's GPT-2 and Llama in stages, under `schedir.torch_pipelining.Schedule`.

Losses and gradients are bitwise equal to those of one process. The tied weight is an exception: the
terms of its gradient are added in another order.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from importlib import import_module
from io import StringIO
from typing import Any, NamedTuple, get_args

import pytest
import torch

import schedir
from schedir import F, I, RankSchedule, W, schedules
from schedir.torch_pipelining import Schedule
from schedir.torch_pipelining.schedule import Runtime
from schedir.transports.local_processes import run_processes
from tests.cases import cases
from tests.cpu.drop_in_steps import forwards_then_backwards
from tests.cpu.huggingface_models import (
    MICROBATCHES,
    RANKS,
    TIED,
    Pipeline,
    RankResults,
    WholeModelRun,
    get_stage_factory,
    load_example_function,
    loss_fn,
    run_whole_model,
)

transformers = pytest.importorskip("transformers")


def backward_weights_in_pairs(rank: int, ranks: int, microbatches: int) -> Iterator[RankSchedule]:
    """Yield 1F1B with split backwards, in which two W follow each other."""
    lead = min(ranks - 1 - rank, microbatches)
    yield lead * F
    for mb in range(microbatches):
        yield (lead + mb < microbatches) * F + I + mb % 2 * 2 * W
    yield microbatches % 2 * W


class Case(NamedTuple):
    """A schedule, and the stages of each rank."""

    schedule: Any
    holds: tuple[tuple[int, ...], ...]

    @property
    def stages(self) -> int:
        return sum(map(len, self.holds))


ONE = ((0,), (1,))
LOOP = ((0, 2), (1, 3))
VEE = ((0, 3), (1, 2))
CASES = {
    "1F1B": Case(schedules.one_f_one_b, ONE),
    "interleaved": Case(schedules.interleaved, LOOP),
    "ZB-H1": Case(schedules.zb_h1, ONE),
    "ZB-V": Case(schedules.zb_v, VEE),
    "DualPipeV": Case(schedules.dualpipe_v, VEE),
    "one's own": Case(backward_weights_in_pairs, ONE),
    "one's own, elsewhere": Case(forwards_then_backwards, ((0, 1), (2, 3))),
}
KINDS = tuple(TIED)
# Each model runs one schedule with split backwards in each runtime, and GPT-2 also one with full
# backwards. `test_drop_in.py` and `test_schedir_runtime.py` run all schedules, on smaller models.
USUAL_SCHEDULES: dict[tuple[str, str], tuple[str, ...]] = {
    ("gpt2", "torch"): ("1F1B", "ZB-V"),
    ("gpt2", "schedir"): ("ZB-V", "one's own, elsewhere"),
}
EXAMPLE_RUNTIMES = ("theirs", *cases(["torch"], ["schedir"]))
MODELS_AND_RUNTIMES: list[tuple[str, Runtime]] = [
    (kind, how) for kind in KINDS for how in get_args(Runtime)
]
NAMES: dict[tuple[str, str], Sequence[str]] = {
    key: cases(usual, [name for name in CASES if name not in usual])
    for key in MODELS_AND_RUNTIMES
    for usual in [USUAL_SCHEDULES.get(key, ("ZB-V",))]
}
Key = tuple[str, str, str, str]


def run_all_cases(rank: int) -> dict[Key, RankResults]:
    """Return a rank's results of each case: a step, `eval`, and another step."""
    results: dict[Key, RankResults] = {}
    for kind, runtime in MODELS_AND_RUNTIMES:
        for name in NAMES[kind, runtime]:
            pipeline = make_pipeline(rank, kind, runtime, CASES[name])
            results[kind, runtime, name, "step"] = pipeline.run(by_hand=False)
            if name == "ZB-V":
                results[kind, runtime, name, "eval"] = pipeline.run("eval")
            if name == "ZB-V" and kind == "gpt2":
                results[kind, runtime, name, "again"] = pipeline.run(by_hand=False)
        if kind == "gpt2" and "1F1B" in NAMES[kind, runtime]:
            pipeline = make_pipeline(
                rank, kind, runtime, CASES["1F1B"], allow_identical_stages=True
            )
            results[kind, runtime, "1F1B", "by hand"] = pipeline.run()
    return results


def make_pipeline(rank: int, kind: str, runtime: Runtime, case: Case, **options: Any) -> Pipeline:
    model = run_whole_model(kind).model
    stages = [get_stage_factory(kind)(model, s, case.stages) for s in range(case.stages)]
    if not options:
        options["tied_weights"] = schedir.find_tied_weights(stages)
    return Pipeline(
        kind, case.holds[rank], case.stages,
        lambda pipeline_stages: Schedule(
            pipeline_stages, n_microbatches=MICROBATCHES, loss_fn=loss_fn, schedule=case.schedule,
            runtime=runtime, **options,
        ),
    )  # fmt: skip


@pytest.fixture(scope="module")
def results_by_rank() -> list[dict[Key, RankResults]]:
    """Run all cases in processes that start once and have the imports of this process."""
    for kind in KINDS:
        run_whole_model(kind), get_stage_factory(kind)
    return run_processes(
        run_all_cases, RANKS, context=multiprocessing.get_context("fork"), timeout=240
    )


@pytest.mark.parametrize(
    ("kind", "runtime", "name"),
    [(*model, name) for model in MODELS_AND_RUNTIMES for name in NAMES[model]],
)
def test_gradients_and_losses_equal_one_process(
    results_by_rank: list[dict[Key, RankResults]], kind: str, runtime: Runtime, name: str
) -> None:
    expected = run_whole_model(kind)
    for run_name in ("step", "again", "by hand"):
        ranks = [
            results[kind, runtime, name, run_name]
            for results in results_by_rank
            if (kind, runtime, name, run_name) in results
        ]
        if not ranks:
            continue
        assert {n for result in ranks for n in result.off} == {*expected.due}
        for result in ranks:
            assert result.same >= result.off.keys() - {TIED[kind]}, run_name
            assert result.off.get(TIED[kind], 0) < 1e-6, run_name
        check_losses_and_logits(ranks, expected)


@pytest.mark.parametrize(("kind", "runtime"), MODELS_AND_RUNTIMES)
def test_eval_returns_losses_and_outputs_without_gradients(
    results_by_rank: list[dict[Key, RankResults]], kind: str, runtime: Runtime
) -> None:
    """`eval` runs between two steps."""
    ranks = [results[kind, runtime, "ZB-V", "eval"] for results in results_by_rank]
    assert not any(result.off for result in ranks)
    check_losses_and_logits(ranks, run_whole_model(kind))


def check_losses_and_logits(ranks: list[RankResults], expected: WholeModelRun) -> None:
    """Check that only the rank of the last stage has losses and logits, and that they are equal."""
    ((losses, logits),) = [
        (result.losses, result.logits) for result in ranks if result.logits is not None
    ]
    assert losses is not None and torch.equal(losses, expected.losses)
    assert torch.equal(logits, expected.logits)


def read_example_outputs(rank: int) -> list[list[str]]:
    """Return the output lines of a rank of the example with each runtime."""
    lines = []
    for runtime in EXAMPLE_RUNTIMES:
        with redirect_stdout(StringIO()) as out:
            load_example_function("main")(rank, runtime)
        lines.append(out.getvalue().splitlines())
    return lines


def test_example_prints_losses_of_torch_schedule() -> None:
    load_example_function("main")
    import_module("torch._dynamo")  # Each process would import it for the optimizer.
    context = multiprocessing.get_context("fork")
    ranks = [*zip(*run_processes(read_example_outputs, RANKS, context=context), strict=True)]
    for _, *middle, last in ranks:
        assert not any(middle) and last == ranks[0][-1]
    losses = [float(line.split()[-1]) for line in ranks[0][-1]]
    assert len(losses) == 5 and losses[-1] < losses[0] - 0.3
