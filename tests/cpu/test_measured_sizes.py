"""Tests that measured sizes equal the memory of live tensors after every instruction of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from schedir import compile, simulate
from schedir.analysis.memory.footprint import Footprint, compute_footprints
from schedir.errors import MemoryLimitError, ModelError
from schedir.ir.cost.sizes import STATIC_SIZES
from schedir.ir.isa.instructions import COMPUTE_OPS, Value
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.models import gpt
from schedir.runtime.autograd.split_backward import DeferredGradients, defer_weight_gradients
from schedir.runtime.autograd.splittable_layers import make_backward_splittable
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.boundaries.size_measurement import measure_sizes
from schedir.runtime.executor import Executor
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.parameters.mixed_precision import use_float32_gradients
from schedir.runtime.program_state import Call
from schedir.runtime.services.message_buffers import MessageBuffers
from schedir.runtime.services.pending_sends import PendingSends
from schedir.schedules import dualpipe_v, gpipe, interleaved, one_f_one_b, zb_h1, zb_v
from tests.cases import cases, each_value
from tests.cpu.tiny_stages import BOUNDARY, HIDDEN, gpt_stages, make_batch, split_1f1b


class AllocatedMemory(TorchDispatchMode):
    """Records the memory that operations allocate, and counts the part that is still live."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: dict[StorageWeakRef, int] = {}
        self.look: Callable[[], None] = lambda: None  # called after each operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = _refs(tree_leaves((args, kwargs)))
        out = func(*args, **(kwargs or {}))
        self.made |= {
            ref: size for ref, size in _refs(tree_leaves(out)).items() if ref not in inputs
        }
        self.look()
        return out

    def living(self, but: Iterable[Tensor] = ()) -> dict[StorageWeakRef, int]:
        """Return the live storages and their sizes in bytes, without those of some tensors."""
        self.made = {ref: size for ref, size in self.made.items() if not ref.expired()}
        these = _refs(but)
        return {ref: size for ref, size in self.made.items() if ref not in these}

    def alive(self, but: Iterable[Tensor] = ()) -> int:
        """Return the live bytes, without the memory of some tensors."""
        return sum(self.living(but).values())


def _refs(values: Iterable[object]) -> dict[StorageWeakRef, int]:
    """Return the storages of the dense tensors in `values`, and their sizes in bytes."""
    tensors = (x for x in values if isinstance(x, Tensor) and not x.is_sparse)
    memory = [x.untyped_storage() for x in tensors]
    return {StorageWeakRef(storage): storage.nbytes() for storage in memory}


class Checkpointed(nn.Module):
    """A stage that saves only its inputs, by activation checkpointing."""

    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return y


def _measure_live_bytes(stages: list[nn.Module], s: int) -> tuple[int, int]:
    """Return the bytes that a stage keeps after a forward, and after I."""
    inputs, targets, _ = make_batch(1)
    memory, is_last = AllocatedMemory(), s == len(stages) - 1
    x = inputs[0] if s == 0 else torch.zeros(BOUNDARY.shape).requires_grad_()
    input_bytes = 0 if s == 0 else x.untyped_storage().nbytes()
    with memory:
        y = stages[s](x)
        y = gpt.loss(y, targets[0]) if is_last else y
        saved = memory.alive([y]) + input_bytes
        tape = DeferredGradients()
        with defer_weight_gradients(tape):
            torch.autograd.backward(y, None if is_last else torch.ones_like(y))
    gradients = [p.grad for p in stages[s].parameters() if p.grad is not None]
    dx = [] if x.grad is None else [x.grad]
    del y
    return saved, memory.alive([*gradients, *dx])


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize(("count", "tied"), [(1, True), (2, True), (3, False)])
def test_saved_size_equals_live_memory_after_forward(
    count: int, tied: bool, reentrant: bool | None
) -> None:
    inputs, targets, _ = make_batch(1)
    stages = gpt_stages(count, tied)
    # A reentrant checkpoint computes no gradient if its input has none.
    for s in range(int(reentrant or False), count if reentrant is not None else 0):
        stages[s] = Checkpointed(stages[s], bool(reentrant))
    sizes = measure_sizes(stages, inputs[0], targets[0], loss=gpt.loss, boundary=BOUNDARY)
    live_bytes = [_measure_live_bytes(stages, s) for s in range(count)]
    assert sizes.saved == tuple(saved for saved, _ in live_bytes)
    assert sizes.deferred_wgrad == tuple(deferred for _, deferred in live_bytes)
    assert all(size > 0 for size in sizes.for_stages("deferred_wgrad", count))


class Witness:
    """Compares the live bytes during and after each F, B, I and W of a rank with the prediction.

    During an instruction, only memory from before it and the tensors deferred by I count.
    """

    def __init__(self, rank: Executor, own: Footprint) -> None:
        self.rank, self.own, self.born = rank, own, AllocatedMemory()
        self.most, self.beside = 0, 0.0  # most live bytes, and the largest error of the prediction
        self.group = 0  # most live bytes while the current group runs
        for k, (wait, run) in enumerate(rank.runner.calls):
            if rank.state.stream[k].op in COMPUTE_OPS:  # these run in the order of the Stream
                rank.runner.calls[k] = Call(wait, partial(self.run, k, run))

    def run(self, k: int, run: Callable[[], None]) -> None:
        rank, footprint, before = self.rank, self.own, self.living()
        peak = sum(before.values())

        def record_live_bytes() -> None:
            nonlocal peak
            tapes = (
                tape.list_saved_tensors()
                for tape in rank.state.slot_tables[Value.DEFERRED_WGRAD].values
                if tape is not None
            )
            live = {ref: size for ref, size in before.items() if not ref.expired()}
            live |= {
                ref: size for ref, size in _refs(x for tape in tapes for x in tape).items()
                if ref in self.born.made
            }  # fmt: skip
            peak = max(peak, sum(live.values()))

        self.born.look = record_live_bytes
        with self.born:
            run()
        alive = sum(self.living().values())
        self.most, peak = max(self.most, peak, alive), max(peak, alive)
        first, last = _find_group(rank.state.stream.joined.tolist(), k)
        self.group = max(self.group if k > first else 0, peak)  # maximum over the group so far
        if k == last:
            has_started = (footprint.positions < first) | footprint.is_at_start & (
                footprint.positions <= last
            )
            self.compare(k, int(np.flatnonzero(has_started)[-1]), self.group)
            self.compare(k, int(np.searchsorted(footprint.positions, k, side="right")) - 1, alive)

    def compare(self, k: int, change: int, alive: int) -> None:
        """Compare the live bytes with the prediction after a change of memory."""
        counted = [part for name, part in self.own.dynamic_memory.items() if name != "handed_over"]
        number, size = (sum(part[i][change] for part in counted) for i in (0, 1))
        assert 0 <= size - alive <= number * own_activation, (self.rank.rank, k)
        self.beside = max(self.beside, float(size - alive))

    def living(self) -> dict[StorageWeakRef, int]:
        """Return the live storages, without outputs of stages and tensors that are being sent."""
        rank = self.rank
        tables = (rank.state.slot_tables[kind] for kind in (Value.ACT_OUT, Value.GRAD_OUT))
        out = [x for table in tables for x in table.values]
        out += [tensor for _, tensor in rank.state.service(PendingSends).works.values()]
        return self.born.living(rank.state.losses + tree_leaves(out))


def _find_group(joined: list[bool], k: int) -> tuple[int, int]:
    """Return the first and the last instruction that are issued together with instruction k."""
    first = last = k
    while joined[first]:
        first -= 1
    while last + 1 < len(joined) and joined[last + 1]:
        last += 1
    return first, last


own_activation = 4 * torch.Size(BOUNDARY.shape).numel()


def normed_stages(stages: int) -> list[nn.Module]:
    """Return stages that are stacks of Linear, LayerNorm and GELU."""
    torch.manual_seed(0)

    def stack() -> nn.Module:
        wide, narrow = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(3 * HIDDEN, HIDDEN, bias=False)
        parts = (wide, nn.LayerNorm(3 * HIDDEN), nn.GELU(), narrow, nn.LayerNorm(HIDDEN))
        return nn.Sequential(*parts, nn.GELU(), nn.Linear(HIDDEN, HIDDEN))

    return [make_backward_splittable(nn.Sequential(stack(), stack())) for _ in range(stages)]


def normed_batch(microbatches: int) -> tuple[Tensor, Tensor, float]:
    shape = (microbatches, *BOUNDARY.shape)
    return torch.randn(shape), torch.randn(shape), 1.0


def split_norm_stages(stages: int) -> list[nn.Module]:
    """Return the same stages. The backward of their norms is split, too."""
    return [make_backward_splittable(stage, nn.LayerNorm) for stage in normed_stages(stages)]


def checkpointed_stages(stages: int) -> list[nn.Module]:
    return [Checkpointed(stage, False) for stage in gpt_stages(stages, tied=False)]


MODELS: dict[str, tuple[Any, Any, Any]] = {
    "gpt": (partial(gpt_stages, tied=False), make_batch, gpt.loss),
    "checkpointed": (checkpointed_stages, make_batch, gpt.loss),
    "asked": (split_norm_stages, normed_batch, nn.functional.mse_loss),
    "normed": (normed_stages, normed_batch, nn.functional.mse_loss),
}


def measure_static_memory(rank: Executor) -> int:
    """Return the bytes of parameters, buffers, gradients and messages of a rank."""
    static = [*rank.state.service(MessageBuffers).received.values()]
    for stage in rank.stages.values():
        static += [*stage.module.parameters(), *stage.module.buffers(), *stage.gradients.flat]
    return sum(_refs(static).values())


PLANS = [
    (gpipe, PipelineShape(2, 4)),
    (one_f_one_b, PipelineShape(3, 4)),
    (split_1f1b, PipelineShape(3, 4)),
    (interleaved, PipelineShape(1, 3, 2)),  # all stages on one rank
    (interleaved, PipelineShape(2, 4, 2)),
    (zb_h1, PipelineShape(3, 5)),
    (zb_v, PipelineShape(2, 4, placement="vee")),
    (dualpipe_v, PipelineShape(2, 5, placement="vee")),
]
CASES = [(*case, "minimal") for case in each_value(PLANS, [*MODELS])]
CASES += [(*plan, "gpt", None) for plan in cases(PLANS[1:4:2], PLANS[:5:2])]


@pytest.mark.parametrize(("schedule", "shape", "model", "slots"), CASES)
def test_memory_during_instructions_equals_prediction(
    schedule: Any, shape: PipelineShape, model: str, slots: Any
) -> None:
    """With shared buffers the prediction is exact.

    With one buffer per message, every received tensor occupies its slot during the whole step.
    """
    make, data, loss = MODELS[model]
    stages, (inputs, targets, scale) = make(shape.stages), data(shape.microbatches)
    sizes = measure_sizes(
        stages, inputs[0], targets[0], loss=loss, boundary=BOUNDARY, optimizer_state=0
    )
    options = {"buffer_sharing": slots, "sizes": sizes}
    peak = float(simulate(compile(schedule, shape, **options), sizes=sizes).peak_memory.max())
    program = compile(schedule, shape, memory_limit=peak, **options)
    world = InProcessExecutor(program, stages, loss=loss, boundary=BOUNDARY)
    witnesses = [*map(Witness, world.executors, compute_footprints(program, sizes))]
    world.step(inputs, targets, scale)
    assert any(witness.most for witness in witnesses)
    timeline = simulate(program, sizes=sizes)
    for rank, witness, curve in zip(world.executors, witnesses, timeline.memory, strict=True):
        static = {name: size for name, (_, size) in witness.own.static_memory.items()}
        handed_over = curve.by_kind.get("handed_over", np.zeros(1))
        outputs = static["act_out"] + static["grad_out"]
        assert measure_static_memory(rank) == sum(static.values()) - outputs
        assert witness.beside == 0 or slots is None
        # Not all output buffers are filled at the same time.
        beside = (curve.total - handed_over).max() - sum(static.values()) - witness.most
        assert beside == 0 if slots else 0 <= beside + outputs <= outputs + witness.beside
    with pytest.raises(MemoryLimitError):
        compile(schedule, shape, memory_limit=peak - 1, **options)


class UnusualStage(nn.Module):
    """A stage with changing buffers, random numbers, and a computation without effect."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        (x.exp() * x).sum()
        y: Tensor = self.drop(self.linear(self.norm(x)))
        return y


def test_measurement_does_not_change_model() -> None:
    stages, x = [UnusualStage(), UnusualStage()], torch.randn(4, 8)
    stages[0].linear.weight.grad = torch.ones(8, 8)
    states_before = [
        {name: value.clone() for name, value in s.state_dict().items()} for s in stages
    ]
    generator_state = torch.get_rng_state()
    sizes = measure_sizes(
        stages, x, x, loss=nn.functional.mse_loss, boundary=Boundary((4, 8)), optimizer_state=0
    )
    assert torch.equal(torch.get_rng_state(), generator_state)
    for stage, state in zip(stages, states_before, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in stage.state_dict().items())
    grads = [p.grad for stage in stages for p in stage.parameters()]
    assert torch.equal(grads[2], torch.ones(8, 8)) if grads[2] is not None else False
    assert sum(grad is not None for grad in grads) == 1
    assert sizes.deferred_wgrad == (0, 0)  # nothing was split
    stage_input = x.clone().requires_grad_()
    with (memory := AllocatedMemory()):
        y = nn.functional.mse_loss(stages[1](stage_input), x)
    assert sizes.for_stages("saved", 2)[1] == memory.alive([y]) + 4 * 4 * 8
    assert sizes.activation == 4 * 4 * 8 and sizes.version == (4 * 88, 4 * 88)
    assert sizes.params == sizes.grads == (4 * 88,) * 2 and sizes.optimizer == (0, 0)
    assert sizes.buffers == (4 * 16 + 8,) * 2  # 8 bytes for num_batches_tracked
    assert sizes.model_states is None
    assert sizes.for_stages("model_states", 2).tolist() == [4 * (88 + 88 + 16) + 8] * 2


def test_sizes_of_local_bfloat16_stages() -> None:
    stages = gpt_stages(2)
    inputs, targets, _ = make_batch(1)
    all_sizes = measure_sizes(stages, inputs[0], targets[0], loss=gpt.loss, boundary=BOUNDARY)
    local_sizes = measure_sizes(
        [None, stages[1]], inputs[0], targets[0], loss=gpt.loss, boundary=BOUNDARY
    )
    for name in ("saved", "deferred_wgrad", "model_states", *STATIC_SIZES, "version"):
        assert local_sizes.for_stages(name, 2).tolist() == [0, all_sizes.for_stages(name, 2)[1]]
    parameter_count = sum(p.numel() for p in stages[1].parameters())
    mask = sum(b.nbytes for b in stages[1].buffers())
    assert local_sizes.for_stages("model_states", 2)[1] == 16 * parameter_count + mask
    half = stages[1].to(torch.bfloat16)
    use_float32_gradients(half)
    boundary = Boundary(BOUNDARY.shape, torch.bfloat16)
    local_sizes = measure_sizes(
        [None, half], inputs[0], targets[0], loss=gpt.loss, boundary=boundary, optimizer_state=12
    )
    assert local_sizes.for_stages("model_states", 2)[1] == 18 * parameter_count + mask
    assert 2 * local_sizes.activation == all_sizes.activation


def test_frozen_last_stage_saves_its_input() -> None:
    stages, x = [nn.Identity(), nn.Identity().requires_grad_(False)], torch.randn(4, 8)
    sizes = measure_sizes(stages, x, x, loss=lambda y, _: y.sum(), boundary=Boundary((4, 8)))
    assert sizes.saved == (0, 4 * 4 * 8) and sizes.for_stages("model_states", 2).tolist() == [0, 0]


def test_output_of_wrong_shape_is_refused() -> None:
    stages, x = [nn.Linear(8, 9), nn.Linear(8, 8)], torch.randn(4, 8)
    with pytest.raises(ModelError, match=r"stage 0 returns \[4, 9\]"):
        measure_sizes(stages, x, x, loss=nn.functional.mse_loss, boundary=Boundary((4, 8)))
