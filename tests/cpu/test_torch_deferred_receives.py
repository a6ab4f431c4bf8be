"""Tests that torch's own programs with deferred receives are refused, as the museum shows."""

from __future__ import annotations

from inspect import signature

import pytest
from torch.distributed.pipelining import schedules

from schedir.analysis.progress_models import MODELS
from schedir.compiler.compile import finish_lowering
from schedir.errors import DeadlockError
from schedir.io import torch_csv
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.verify.check import check
from tests.cases import cases
from tests.cpu.torch_schedules import LOOP, VEE, lower_torch_schedule
from tests.museum.cases import cases as make_museum_cases

pytestmark = pytest.mark.skipif(
    "defer_pp_recv" not in signature(schedules.ScheduleInterleaved1F1B).parameters,
    reason="torch began to defer receives in 2.13",
)


def read_torch_program(name: str, defer: bool) -> Program:
    """Return torch's program of a schedule on 2 ranks, with 2 microbatches, or 4 in a vee."""
    shape = PipelineShape(2, 4, 2, "vee") if name in VEE else PipelineShape(2, 2, 2)
    return finish_lowering(
        torch_csv.from_csv(lower_torch_schedule(name, shape, defer_pp_recv=defer))
    )


def test_museum_case_equals_torch_program() -> None:
    (case,) = [case for case in make_museum_cases() if case.name == "torch_defer_pp_recv"]
    assert case.made().streams == read_torch_program("ScheduleInterleaved1F1B", defer=True).streams


@pytest.mark.parametrize("name", cases([LOOP[0], VEE[0]], [*LOOP[1:], *VEE[1:]]))
def test_deferred_receives_deadlock_per_device(name: str) -> None:
    for model in MODELS:
        check(read_torch_program(name, defer=False), model)
    check(read_torch_program(name, defer=True), "per_edge")
    with pytest.raises(DeadlockError) as caught:
        check(read_torch_program(name, defer=True), "per_device")
    assert {wait.rank for wait in caught.value.cycle} == {0, 1}
