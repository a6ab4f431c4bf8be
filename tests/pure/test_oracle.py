"""Tests of the oracle: its verdicts, and that the order of its threads does not matter."""

from __future__ import annotations

import inspect
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedir.analysis.progress_models import MODELS
from schedir.compiler.compile import compile, lower
from schedir.errors import SchedirError
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.pipeline.placement import find_named_placement
from schedir.ir.program import Program
from schedir.schedules.schedule_algebra import Schedule
from schedir.testing import compute_programs
from tests.cases import each_value
from tests.edits import written
from tests.mutants import FEW, MUTATIONS, built_in_schedules, mutate
from tests.oracle_threads import verdict

seeds = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize(("schedule", "overlap"), each_value(built_in_schedules(), [False, True]))
def test_every_schedule_passes_oracle(schedule: Schedule, overlap: bool) -> None:
    placement, v = getattr(schedule, "placed", ("loop", None))
    takes_v = "v" in inspect.signature(schedule).parameters
    v = v or (2 if takes_v else find_named_placement(placement).stages_per_rank)
    for model in MODELS:
        program = compile(
            schedule, PipelineShape(4, 8, v, placement), tp=2, tied_weights=True,
            clip_grad_norm=True,
            progress_model=model, overlap=overlap,
        )  # fmt: skip
        assert verdict(program, model).kind == "ok"


WRONG = {
    "used before it is there": written("B 0.0; F 0.0; reduce_grads 0; step"),
    "left over": written("F 0.0; I 0.0; W 0.0; B 0.0; reduce_grads 0; step"),
    "never reduced": written("F 0.0; B 0.0; step"),
    "never stepped": written("F 0.0; B 0.0; reduce_grads 0"),
    "no loss": written("F 0.0; F 0.1", microbatches=3),
    "reduced too early": written("F 0.0; B 0.0; F 0.1; reduce_grads 0; B 0.1; step",
                                 microbatches=2),
    "not clipped": written("F 0.0; B 0.0; reduce_grads 0; step", header="clip yes"),
    "clipped before the sum": written(
        "F 0.0; B 0.0; reduce_grads 0; reduce_norm; step",
        header="tied_weights yes clip_grad_norm yes placement 0,0"
    ),
    "elsewhere": written("F 0.0; F 1.0", "F 1.0"),
    "another microbatch": written("F 0.0; send_act 0.0; F 0.1; send_act 0.1",
                                  "recv_act 1.1; recv_act 1.0; F 1.0; F 1.1", microbatches=2),
    "crossed in a group": written("F 0.0; F 0.1; send_act 0.0 & send_act 0.1",
                                  "recv_act 1.1 & recv_act 1.0; F 1.0; F 1.1", microbatches=2),
    "not gathered": written("F 0.0; tp_scatter_act 0.0; send_act 0.0", "recv_act 1.0; F 1.0",
                            header="tp 2"),
}  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_program_has_verdict_wrong(name: str, model: str) -> None:
    assert verdict(WRONG[name], model).kind == "wrong"


def test_deadlock_has_verdict_hang() -> None:
    assert verdict(written("F 0.0", "recv_act 1.0; F 1.0"), "per_edge").kind == "hang"
    crossed = written(
        "F 0.0; send_act 0.0; F 0.1; recv_grad 0.0; send_act 0.1; B 0.0; recv_grad 0.1; B 0.1;"
        "reduce_grads 0; step",
        "recv_act 1.0; F 1.0; recv_act 1.1; F 1.1; B 1.0; send_grad 1.0; B 1.1; send_grad 1.1;"
        "reduce_grads 1; step",
        microbatches=2,
    )
    kinds = {model: verdict(crossed, model).kind for model in MODELS}
    assert [model for model, kind in kinds.items() if kind == "ok"] == ["per_edge", "per_direction"]
    assert {*kinds.values()} == {"ok", "hang"}


@given(seeds, st.sampled_from([*MUTATIONS]), st.sampled_from(MODELS), seeds)
def test_verdict_does_not_depend_on_thread_order(
    seed: int, name: str, model: str, order: int
) -> None:
    try:
        _, mutant = mutate(name, seed, mixed=True, corpus=FEW)
    except SchedirError:  # the mutant is no program
        return
    assert verdict(mutant, model).kind == verdict(mutant, model, order).kind


@given(compute_programs(), seeds)
def test_end_order_of_run_is_legal_program(draft: Program, seed: int) -> None:
    """The order in which a run under `per_edge` ended is legal under every model."""
    run = MUTATIONS["run_order"](lower(draft), random.Random(seed))
    assert run is not None
    assert [verdict(run, model).kind for model in MODELS] == ["ok"] * len(MODELS)
