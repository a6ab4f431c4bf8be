"""`schedir.torch.Schedule`: a program of ours where torch's own schedules stand."""

from __future__ import annotations

import pytest
from torch.nn.functional import mse_loss

from schedir.testing.gradients import assert_same_gradients
from tests.cpu.faces import step_of
from tests.cpu.torchs import batch, model

SCHEDULES = [
    ("gpipe", "loop", 2),
    ("one_f_one_b", "loop", 2),
    ("zb_h1", "loop", 2),
    ("interleaved", "loop", 4),
    ("interleaved_zb", "loop", 4),
    ("zb_v", "vee", 4),
    ("dualpipe_v", "vee", 4),
]


@pytest.mark.parametrize(("name", "placement", "stages"), SCHEDULES)
def test_gradients_are_those_of_a_plain_loop(name: str, placement: str, stages: int) -> None:
    step = step_of(placement, schedule=name)
    assert_same_gradients(step, model(stages), batch(), ranks=2, microbatches=4, loss_fn=mse_loss)
