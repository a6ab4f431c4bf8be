"""Tests that recomputation has exactly the predicted memory."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from schedir.analysis.memory.footprint import compute_footprints
from schedir.compiler.compile import compile
from schedir.errors import MemoryLimitError
from schedir.ir.isa.instructions import RECOMPUTE
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.predict.simulate import simulate
from schedir.runtime.boundaries.size_measurement import measure_sizes
from schedir.runtime.in_process import InProcessExecutor
from schedir.schedules import (
    dualpipe,
    dualpipe_v,
    gpipe,
    interleaved,
    one_f_one_b,
    zb_h1,
    zb_v,
)
from tests.cases import cases, each_value
from tests.cpu import test_recompute as runs
from tests.cpu.test_measured_sizes import MODELS, Witness
from tests.cpu.test_recompute import WIDTH, noisy, squares
from tests.cpu.test_recompute_of_writing_stages import Means
from tests.cpu.tiny_stages import BOUNDARY

torch.set_num_threads(1)

# ---------------------------------------------------------------- bytes

SHAPES = cases(
    [
        (one_f_one_b, PipelineShape(3, 4)),
        (zb_v, PipelineShape(2, 3, placement="vee", stages_per_rank=2)),
        (dualpipe, PipelineShape(2, 4, placement="mirror")),
    ],
    [
        (gpipe, PipelineShape(2, 4)),
        (zb_h1, PipelineShape(3, 5)),
        (interleaved, PipelineShape(2, 4, 2)),
        (dualpipe_v, PipelineShape(2, 5, placement="vee", stages_per_rank=2)),
    ],
)


@pytest.mark.parametrize(
    ("schedule", "shape", "recompute", "model"),
    each_value(SHAPES, ["all", "late", "some"], ["gpt", "normed"]),
)
def test_live_memory_with_recompute_matches_prediction(
    schedule: Any, shape: PipelineShape, recompute: str, model: str
) -> None:
    """A witness compares the bytes of live storages during and after each instruction."""
    make, data, loss = MODELS[model]
    stages, (inputs, targets, scale) = make(shape.stages), data(shape.microbatches)
    sizes = measure_sizes(
        stages, inputs[0], targets[0], loss=loss, boundary=BOUNDARY, optimizer_state=0
    )
    options_by_name: dict[str, dict[str, Any]] = {
        "all": {"recompute": "all"},
        "late": {"recompute": "all", "recompute_at": "late"},
        "some": {"recompute": lambda s, m: (s + m) % 2 == 0},
    }
    options = options_by_name[recompute]
    compiled: Any = partial(compile, schedule, shape, buffer_sharing="minimal")
    plain, recomputed = compiled(), compiled(**options)
    assert RECOMPUTE in recomputed.used_opcodes
    peak_recomputed, peak_plain = (
        simulate(p, sizes=sizes).peak_memory for p in (recomputed, plain)
    )
    assert (peak_recomputed <= peak_plain).all() and (peak_recomputed < peak_plain).any()
    limit = float(peak_recomputed.max())
    program = compiled(sizes=sizes, memory_limit=limit, **options)
    world = InProcessExecutor(program, stages, loss=loss, boundary=BOUNDARY)
    witnesses = [*map(Witness, world.executors, compute_footprints(program, sizes))]
    world.step(inputs, targets, scale)
    assert all(witness.beside == 0 for witness in witnesses)
    with pytest.raises(MemoryLimitError):
        compiled(sizes=sizes, memory_limit=limit - 1, **options)


FROZEN_BYTES = 3 * 4 * WIDTH
BUFFER_BYTES = 2 * 4 * WIDTH + 8  # mean and variance, and the number of batches


@pytest.mark.parametrize(("layer", "size"), [(Means, FROZEN_BYTES), (runs.Noisy, BUFFER_BYTES)])
def test_recompute_inputs_include_written_tensors(layer: Any, size: int) -> None:
    """The tensors are frozen parameters or buffers, and the measurement restores them."""
    x, stages = runs.batch(1)[0][0], noisy(2, layer)
    before = [tensor.clone() for stage in stages for tensor in stage.state_dict().values()]
    sizes = measure_sizes(stages, x, x, loss=squares, boundary=runs.BOUNDARY)
    assert sizes.recompute_inputs == (size, 4 * 2 * WIDTH + size)
    after = [tensor for stage in stages for tensor in stage.state_dict().values()]
    assert all(map(torch.equal, before, after))
