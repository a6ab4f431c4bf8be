"""Tests of segments over Gloo: the bits of whole stages, and refused in-place sums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from schedir import Costs, PipelineShape, compile, schedules
from schedir.errors import ExecutionError, ModelError
from schedir.models import gpt
from schedir.models.gpt_segments import build_boundaries, count_segments, split_stage
from schedir.models.partial_module import select_submodules
from schedir.runtime import (
    Boundary,
    Executor,
    GlooTransport,
    GradientOptions,
    InProcessExecutor,
    measure_sizes,
)
from schedir.runtime.boundaries.boundary import ModelBoundaries
from schedir.runtime.boundaries.microbatch_boundaries import require_fit
from schedir.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from tests.cases import each_value
from tests.cpu.gloo_processes import run
from tests.cpu.tiny_stages import have_same_bits

CONFIG = gpt.GPTConfig(vocab=61, layers=4, hidden=32, heads=4, context=8, dropout=0.1)
HIDDEN = (2, 8, 32)

# For each schedule: the stages per rank, the number of chunks per microbatch (so that there are
# four chunks in all), and further options of the program.
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "one_f_one_b": (1, 2, {"recompute": lambda s, mb: mb == 1, "overlap": True}),
    "zb_h1": (1, 1, {"buffer_sharing": "minimal"}),
    "interleaved": (2, 1, {}),
}
# Options for tensor-parallel ranks that divide the sequence.
SEQUENCE_PARALLEL_OPTIONS: dict[str, dict[str, Any]] = {
    "one_f_one_b": {"recompute": lambda s, mb: mb == 1, "overlap": True},
    "zb_h1": {
        "fill_collective_waits": "W",
        "costs": Costs(F=1, I=1, W=1, tp_reduce=1, tp_gather=1),
    },
    "interleaved": {"buffer_sharing": "minimal"},
}


def select_modules(
    stages: Mapping[int, gpt.Stage], cut: tuple[int, ...] | None
) -> Mapping[int, nn.Module]:
    """Return the stages by number, or their segments if `cut` is not None."""
    if cut is None:
        return stages
    first = [0, *accumulate(cut)]
    return {first[s] + k: one for s in stages for k, one in enumerate(split_stage(stages[s]))}


def train_steps(
    name: str, cut: tuple[int, ...] | None, options_of_case: dict[str, Any]
) -> dict[str, Any]:
    """Return losses, norm, weights and gradients of two steps, and the loss of an evaluation."""
    torch.manual_seed(0)
    v, chunks, _ = CASES[name]
    shape = PipelineShape(2, 4 // chunks if cut else 4, v)
    if not cut:
        options_of_case = {
            key: value for key, value in options_of_case.items() if key != "fill_collective_waits"
        }
    sequence = options_of_case.get("sequence_parallel", False)
    compiled: Any = partial(
        compile, shape=shape, tp=2, tied_weights=True, progress_model="per_edge",
        sequence_parallel=sequence, blocking_hosts=True, stage_segments=cut,
        microbatch_chunks=chunks if cut else None,
    )  # fmt: skip
    program = compiled(getattr(schedules, name), clip_grad_norm=True, **options_of_case)
    evaluates = compiled(schedules.forward_only)
    transport = GlooTransport(program, extra_programs=[evaluates])
    tp = transport.tp_group
    stages = {
        s: gpt.build_stage(CONFIG, s, shape.stages, tp=tp, sequence_parallel=sequence)
        for s in shape.stages_on_rank[transport.rank]
    }
    share = 2 if sequence else 1
    boundary: Any = (2, 8 // share, 32)
    if cut is not None:
        boundary = build_boundaries(cut, boundary, tp_size=share)
    parameters = {f"{s} {n}": p for s, stage in stages.items() for n, p in stage.named_parameters()}
    executor = Executor(
        program, transport.rank, select_modules(stages, cut), transport,
        loss=partial(gpt.loss, tp=tp),
        boundary=boundary,
        gradients=GradientOptions(max_norm=1.0),
        optimizer=torch.optim.SGD(parameters.values(), lr=0.1), extra_programs=[evaluates],
    )  # fmt: skip
    tokens = torch.randint(CONFIG.vocab, (4, 2, 9))
    batch = tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous()
    results: dict[str, Any] = {"loss": [executor.step(*batch, 0.01) for _ in range(2)]}
    results |= {"norm": executor.grad_norm, "evaluated": executor.evaluate(*batch)}
    return results | {name: (p.detach(), p.grad) for name, p in parameters.items()}


def find_differences(rank: int, name: str, sequence: bool) -> list[str]:
    """Return the results of a run in segments whose bits differ from a run of whole stages.

    The run of whole stages has as many microbatches as the other has chunks.
    """
    shape, options = PipelineShape(2, 4, CASES[name][0]), CASES[name][2]
    if sequence:
        options = SEQUENCE_PARALLEL_OPTIONS[name] | {"sequence_parallel": True}
    cut = count_segments([CONFIG.layers // shape.stages] * shape.stages)
    stage_results, segment_results = (train_steps(name, each, options) for each in (None, cut))
    return [
        key
        for key, value in stage_results.items()
        if not have_same_bits(value, segment_results[key])
    ]


@pytest.mark.parametrize(("name", "sequence"), each_value([*CASES], [False, True]))
def test_segments_have_bits_of_whole_stages(name: str, sequence: bool) -> None:
    """Losses, gradients, weights and norm are equal, for a tied model with dropout.

    Four processes run it, with in-place sums or with sequence parallelism.
    """
    assert run(find_differences, 4, name, sequence) == [[]] * 4


def test_segments_after_frozen_stage_have_same_bits() -> None:
    """The inputs of the first trained segment have no gradient, nor has its residual input."""
    results: list[Any] = []
    for cut in (None, count_segments([2, 2])):
        program = compile(
            schedules.one_f_one_b, PipelineShape(2, 4), frozen_stages=1, stage_segments=cut
        )
        config = replace(CONFIG, tied=False)
        stages = {s: gpt.build_stage(config, s, 2) for s in range(2)}
        stages[0].requires_grad_(False)
        modules = select_modules(stages, cut)
        boundary: Any = HIDDEN if cut is None else build_boundaries(cut, HIDDEN, frozen_stages=1)
        ranks = InProcessExecutor(
            program, [modules[s] for s in sorted(modules)], loss=gpt.loss, boundary=boundary
        )
        tokens = torch.arange(72).view(4, 2, 9) % CONFIG.vocab
        loss = ranks.step(tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous())
        results.append([loss, *(p.grad for s in stages for p in stages[s].parameters())])
    assert have_same_bits(*results) and sum(p is not None for p in results[0]) > 20


# ---------------------------------------------------------------- users' own modules


class PartialSum(nn.Module):
    """Computes the partial sum of a rank from its slice of the features."""

    def __init__(self, up: ColumnParallelLinear, down: RowParallelLinear) -> None:
        super().__init__()
        self.up, self.down = up, select_submodules(down, ["weight"])

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return self.down.project_partial(self.up.forward_local(x).relu()), residual


class BiasAndResidual(nn.Module):
    def __init__(self, down: RowParallelLinear, last: bool) -> None:
        super().__init__()
        self.down, self.last = select_submodules(down, ["bias"]), last

    def forward(self, part: Tensor, residual: Tensor) -> Any:
        x = residual + self.down.add_bias(part)
        return x.sum(-1) if self.last else x


class Twice(nn.Module):
    """Returns its input twice: the first output is summed over ranks, and the second is not."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


def compare_user_stage(rank: int) -> list[bool]:
    """Return whether a user's stage, cut "fg", has the loss and gradients of one process.

    It sums in place, and has sequence parallelism for several samples and for one.
    """
    is_close = []
    for samples, sequence in (((2,), False), ((3,), True), ((), True)):
        program = compile(
            schedules.zb_h1 if sequence else schedules.one_f_one_b, PipelineShape(1, 3), tp=2,
            stage_segments="fg", progress_model="per_edge", sequence_parallel=sequence,
        )  # fmt: skip
        transport = GlooTransport(program)
        torch.manual_seed(0)
        w, b, v, c = torch.randn(8, 4), torch.randn(8), torch.randn(4, 8), torch.randn(4)
        options: Any = {"group": transport.tp_group, "sequence_parallel": sequence}
        up, down = ColumnParallelLinear(w, b, **options), RowParallelLinear(v, c, **options)
        full_shape = (*samples, 2, 4)
        local_shape = (*samples, 1, 4) if sequence else full_shape
        executor = Executor(
            program, 0, [Twice(), PartialSum(up, down), BiasAndResidual(down, True)], transport,
            loss=lambda y, target: ((y - target) ** 2).sum(),
            boundary={0: (Boundary(local_shape, received_shape=full_shape), Boundary(local_shape)),
                      1: (Boundary(full_shape, received_shape=local_shape), Boundary(local_shape))},
        )  # fmt: skip
        x = torch.randn(3, *full_shape)
        local_tokens = x[..., rank : rank + 1, :].contiguous() if sequence else x
        loss = executor.step(local_tokens, torch.ones(local_tokens.shape[:-1]))
        assert loss is not None
        if sequence:
            dist.all_reduce(loss, group=transport.tp_group)
        weights = [p.clone().requires_grad_() for p in (w, b, v, c)]
        y = x + (x @ weights[0].T + weights[1]).relu() @ weights[2].T + weights[3]
        want = ((y.sum(-1) - 1) ** 2).sum()
        want.backward()
        shard = slice(4 * rank, 4 * rank + 4)
        grads = [p.grad for p in weights]
        parts = (grads[0][shard], grads[1][shard], grads[2][:, shard], grads[3])  # type: ignore[index]
        got = (up.weight.grad, up.bias.grad, down.weight.grad, down.bias.grad, loss)  # type: ignore[union-attr]
        is_close += [
            torch.allclose(one, other, rtol=1e-5, atol=1e-6)  # type: ignore[arg-type]
            for one, other in zip(got, (*parts, want.detach()), strict=True)
        ]
    return is_close


def test_segments_of_user_stage_have_gradients_of_one_process() -> None:
    """The stage is tested with in-place sums and with sequence parallelism."""
    assert run(compare_user_stage, 2) == [[True] * 15] * 2


LOCAL_SHAPE, FULL_SHAPE = (2, 4, 8), (2, 8, 8)
WRONG_BOUNDARIES: dict[str, tuple[Any, str]] = {
    "not said": (LOCAL_SHAPE, r"tensor 0 from stage 0 .* gives this tensor the shape \[2, 8, 8\]"),
    "of another": (
        Boundary(LOCAL_SHAPE, received_shape=(2, 4, 16)),
        r"received as \[2, 4, 16\], but the program gives this tensor the shape \[2, 8, 8",
    ),
    "beside": (
        (
            Boundary(LOCAL_SHAPE, received_shape=FULL_SHAPE),
            Boundary(LOCAL_SHAPE, received_shape=FULL_SHAPE),
        ),
        r"tensor 1 from stage 0",
    ),
    "a vector": ((8,), "must share its sequence, which is the second last dimension"),
}


@pytest.mark.parametrize("name", WRONG_BOUNDARIES)
def test_wrong_boundary_of_sequence_parallel_segment_is_refused(name: str) -> None:
    program = compile(
        schedules.gpipe, PipelineShape(1, 1), tp=2, stage_segments="fg", sequence_parallel=True
    )
    wrong_boundary, message = WRONG_BOUNDARIES[name]
    right_boundaries: Any = {
        0: Boundary(LOCAL_SHAPE, received_shape=FULL_SHAPE),
        1: Boundary(FULL_SHAPE, received_shape=LOCAL_SHAPE),
    }
    require_fit(ModelBoundaries.from_edges(right_boundaries, 3), program)
    with pytest.raises(ModelError, match=message):
        require_fit(ModelBoundaries.from_edges(right_boundaries | {0: wrong_boundary}, 3), program)
    for other in (replace(right_boundaries[1], shape=(2, 7, 8)), Boundary(FULL_SHAPE)):
        with pytest.raises(ModelError, match="tensor 0 from stage 1 is"):
            require_fit(ModelBoundaries.from_edges(right_boundaries | {1: other}, 3), program)
    plain_program = compile(schedules.gpipe, PipelineShape(1, 1), tp=2, stage_segments="fg")
    with pytest.raises(ModelError, match=r"gives this tensor the shape \[2, 4, 8\]"):
        require_fit(ModelBoundaries.from_edges(right_boundaries, 3), plain_program)


def test_measured_sizes_include_full_segment_inputs() -> None:
    """With sequence parallelism, a segment input has a local and a full copy in memory."""
    config = replace(CONFIG, layers=1, tied=False)
    parts, tokens = split_stage(gpt.build_stage(config, 0, 1)), torch.zeros(2, 8, dtype=torch.long)
    local_bytes = torch.zeros(2, 4, 32).nbytes
    for share, expected_bytes in ((1, 2 * local_bytes), (2, 2 * local_bytes + 2 * local_bytes)):
        boundaries = build_boundaries((5,), (2, 4, 32), tp_size=share)
        local_tokens = tokens[:, : 8 // 2]
        sizes = measure_sizes(parts, local_tokens, local_tokens, loss=gpt.loss, boundary=boundaries)
        assert sizes.activation == expected_bytes and sizes.activation_grad is None
        widths = 3 + 1 + 1  # attention keeps at least its input, q, k, v and its output
        assert np.all(
            sizes.per_microbatch("saved", PipelineShape(1, 1, 5))[1] >= widths * share * local_bytes
        )


class SavedOutput(nn.Module):
    """A module whose backward needs its output."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).sigmoid()


class Identity(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class SumOfInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, *x: Tensor) -> Tensor:
        return (x[0] * self.scale).sum()


def run_two_segments(first: nn.Module, boundary: Any = (2, 4)) -> tuple[Tensor | None, Tensor]:
    program = compile(
        schedules.gpipe, PipelineShape(1, 2), tp=2, stage_segments="g", progress_model="per_edge"
    )
    x = torch.ones(2, 2, 4)
    executor = Executor(
        program, 0, [first, SumOfInput()], GlooTransport(program), loss=lambda y, _: y,
        boundary=boundary,
    )  # fmt: skip
    return executor.step(x, torch.ones(2, 1)), x


def sum_in_place(rank: int) -> tuple[float, float]:
    """Sum an input that a stage returns unchanged, and tensors that cannot be overwritten."""
    loss, x = run_two_segments(Identity())
    assert loss is not None
    table = Boundary((2, 4), torch.float32, requires_grad=False)
    with pytest.raises(ModelError, match=r"sums tensor 0 .* has no gradient"):
        run_two_segments(Twice(), (table, Boundary((2, 4))))
    # The backward of the stage has saved its output.
    with pytest.raises(ExecutionError, match="modified by an inplace operation"):
        run_two_segments(SavedOutput())
    return float(loss), float(x.sum())


def test_in_place_sum_of_needed_tensor_is_refused() -> None:
    """Inputs that a stage returns unchanged are not overwritten.

    A sum in place of a tensor that a backward needs, or that has no gradient, is refused.
    """
    assert run(sum_in_place, 2) == [(32.0, 16.0)] * 2


def test_segments_of_tied_single_stage_are_refused() -> None:
    with pytest.raises(ModelError, match="use two or more stages, or tied=False"):
        split_stage(gpt.build_stage(CONFIG, 0, 1))
    with pytest.raises(ModelError, match="has no parameter or submodule 'up'"):
        select_submodules(nn.Linear(2, 2), ["up.weight"])
