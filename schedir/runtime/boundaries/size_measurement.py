"""Measure the Sizes of a model by running one microbatch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map_only

from schedir.errors import ModelError, describe, describe_exception
from schedir.ir.cost.sizes import Sizes
from schedir.ir.cost.zero_states import ModelStates, zero_model_states
from schedir.ir.pipeline.skip_connections import Skips
from schedir.runtime.arguments import require_loss, require_model_stages, require_scalar_loss
from schedir.runtime.autograd.module_buffers import preserve_buffers
from schedir.runtime.autograd.split_backward import DeferredGradients, defer_weight_gradients
from schedir.runtime.autograd.stage_inputs import StageInputAdapter
from schedir.runtime.boundaries.boundary import (
    Boundary,
    BoundaryByEdge,
    BoundaryLike,
    Edge,
    ModelBoundaries,
    infer_requires_grad,
    require_output_tensors,
    split_skip_output,
)
from schedir.runtime.boundaries.boundary_table import PerMicrobatchBoundary
from schedir.runtime.model_checks.tensor_fingerprint import compute_checksums, has_same_bits
from schedir.runtime.parameters.buckets import ShardSpec, make_buckets
from schedir.runtime.parameters.mixed_precision import unwrap_optimizer
from schedir.runtime.parameters.overlapped_reduction import BUCKET_BYTES
from schedir.runtime.rank_resources import Loss
from schedir.runtime.step_inputs import require_input_tensors

# ---------------------------------------------------------------- training state

# Bytes of the trained parameters of a stage, of their gradients and of the optimizer's state.


OptimizerFactory = Callable[[list[nn.Parameter]], Any]  # makes an optimizer


def _count_gradient_bytes(p: nn.Parameter) -> float:
    """Bytes of a parameter's gradient."""
    return float(p.numel() * (p.grad_dtype or p.dtype).itemsize)


def measure_model_states(
    module: nn.Module,
    optimizer_state: float | OptimizerFactory,
    shard_spec: ShardSpec,
    replicas: range,
) -> ModelStates:
    """Bytes of a stage's parameters that are trained, of their gradients and the optimizer's state.

    All are whole, as `measure_sizes` tells them; `replicas` are those of which the one with most
    counts.
    """
    trained = [p for p in module.parameters() if p.requires_grad]
    storages = {x.data_ptr(): x.nbytes() for x in (p.untyped_storage() for p in trained)}
    params = float(sum(storages.values()))
    if shard_spec == ShardSpec():
        return ModelStates(
            params,
            float(sum(map(_count_gradient_bytes, trained))),
            _measure_optimizer_state(trained, optimizer_state),
        )
    tied = getattr(module, "tied_weight", None)
    alone = [p for p in trained if p is tied]
    buckets = make_buckets(trained, BUCKET_BYTES, shard_spec.replicas, alone, aligned=True)
    grads = float(sum(b.numel * b.grad_dtype.itemsize for b in buckets))
    if not shard_spec.zero:
        return ModelStates(params, grads, _measure_optimizer_state(trained, optimizer_state))
    params = float(sum(b.numel * b.dtype.itemsize for b in buckets))
    most = 0.0
    for k in replicas:
        pieces = []
        for bucket in buckets:
            for low, high, _ in bucket.list_shard_ranges(k):
                if high > low:
                    numbers = torch.empty(high - low, dtype=bucket.dtype, device="meta")
                    pieces.append(nn.Parameter(numbers))
                    pieces[-1].grad_dtype = bucket.grad_dtype
        most = max(most, _measure_optimizer_state(pieces, optimizer_state))
    return ModelStates(params, grads, shard_spec.replicas * most)


def _measure_optimizer_state(
    trained: Sequence[nn.Parameter], optimizer_state: float | OptimizerFactory
) -> float:
    """Bytes that an optimizer holds for parameters once it has stepped, without them and their
    gradients.

    One that is made is made of parameters on the device "meta", which have no memory, and so
    takes none itself.
    """
    if not callable(optimizer_state):
        return optimizer_state * sum(p.numel() for p in trained)
    if not trained:
        return 0.0
    own = []
    for p in trained:
        own.append(nn.Parameter(torch.empty_like(p, device="meta")))
        own[-1].grad_dtype = p.grad_dtype
        own[-1].grad = torch.empty_like(p, device="meta", dtype=p.grad_dtype or p.dtype)
    try:
        optimizer = optimizer_state(own)
        optimizer.step()
        held = [
            *getattr(optimizer, "main_parameters", ()),
            *tree_leaves([*unwrap_optimizer(optimizer).state.values()]),
        ]
    except Exception as error:
        raise ModelError(
            f"the optimizer cannot be measured without its memory: {describe_exception(error)}",
            hint="optimizer_state=8.0, say: how many bytes it holds for each number",
        ) from error
    # On "meta" all memory is at the address 0, so what has one memory is told by its tensor.
    tensors = {id(x): x for x in held if isinstance(x, Tensor)}
    return float(sum(x.untyped_storage().nbytes() for x in tensors.values()))


def measure_sizes(
    stages: Sequence[nn.Module | None],
    input: Tensor | Sequence[Tensor],
    target: Any,
    *,
    loss: Loss,
    boundary: BoundaryLike | BoundaryByEdge | ModelBoundaries,
    optimizer_state: float | OptimizerFactory = 8.0,
    frozen_stages: int = 0,
    keywords: Mapping[str, Any] = MappingProxyType({}),
    dp: int = 1,
    zero: int = 0,
    replica: int | None = None,
) -> Sizes:
    """The Sizes of a model of those stages, in order; those of None, which others hold, are 0.

    `input` is one microbatch of the first stage's, `target` of the loss's, `keywords` what all are
    given by name for it; other stages get zeros.
    `optimizer_state` is how many bytes an optimizer holds for each number that is trained: 8 are
    AdamW's two moments in float32.  Or it makes an optimizer of parameters, of which then all is
    counted that it holds after a step: copies in float32 that it steps, and numbers of steps.  The
    first
    `frozen_stages` stages keep nothing of a microbatch, as in a program with so many, and the stage
    behind them nothing for a gradient of its input.

    `saved` is the input of a stage and what autograd saves, each storage once; `deferred_wgrad` is
    what is left for a BackwardWeight, and `saved_and_deferred` the most that there is of the two at
    once in a BackwardInput, in which autograd lets go what was saved as it is done with it.
    Parameters, buffers, the model's input and the target are in none: they are there all the time.
    Of a checkpointed part what it keeps is counted, and not what it makes again.  `checkpoint` is
    what a forward keeps that is to be run again: its inputs, and buffers that it writes to.
    Nothing counts that an instruction needs only while it runs.

    With `dp` replicas gradients lie in buckets, and from level 1 of `zero` on weights do, too:
    `params` and `grads` are then those of buckets, which are padded so that all parts are of one
    length.  Of the optimizer's state each replica has that of the numbers in its parts; `optimizer`
    is `dp` times that of the one that has most, or of the `replica` with that number.  So all are
    whole ones, of which a program at that level leaves 1/dp where it cuts them.

    Gradients, buffers and random numbers are left as they were.  Hooks run, and stages that talk
    within their tensor-parallel group do: all its ranks must call this.  Raises ModelError where
    a stage gives what cannot pass the boundary, and for arguments of another kind.

    >>> import torch
    >>> from torch import nn
    >>> from schedir.runtime import measure_sizes
    >>> stages, x = [nn.Linear(64, 64), nn.Linear(64, 64)], torch.ones(8, 64)
    >>> sizes = measure_sizes(stages, x, x, loss=nn.functional.mse_loss, boundary=(8, 64))
    >>> sizes.activation, sizes.saved, sizes.params  # bytes; of saved and params for each stage
    (2048.0, (0.0, 4096.0), (16640.0, 16640.0))
    >>> sizes.for_stages("model_states", 2)  # with gradients and the optimizer's state
    array([66560., 66560.])
    """
    loss = require_loss(loss)
    if not isinstance(target, Tensor):
        raise ModelError(f"target is a microbatch, one tensor, not {describe(target)}")
    xs = _require_microbatch(input)
    stages = require_model_stages(stages, allow_missing=True)
    named = boundary if isinstance(boundary, Mapping) else ()
    skips = tuple(sorted(edge for edge in named if isinstance(edge, tuple)))
    if isinstance(boundary, PerMicrobatchBoundary):
        raise ModelError(
            f"boundaries are given of {len(boundary.boundaries)} microbatches, and one is measured",
            hint="sizes_of for each microbatch with its own boundary",
        )
    boundaries = ModelBoundaries.from_edges(boundary, len(stages), skips=skips)
    zero_model_states(0, 0, 0, zero, dp)  # which says what levels and numbers of replicas there are
    if replica is not None and replica not in range(dp):
        raise ModelError(f"there are replicas 0 to {dp - 1}, not {describe(replica)}")
    parts = range(dp) if replica is None else range(replica, replica + 1)
    share = ShardSpec(dp, parts[0], zero)
    given = _StageInputs(
        xs, target, keywords, loss, boundaries, optimizer_state, frozen_stages, share, parts
    )
    found = [
        _measure_stage(stages, s, given) if stage is not None else _StageBytes()
        for s, stage in enumerate(stages)
    ]
    sent = [crossing.memory_bytes for crossing in boundaries.stage_boundaries]
    skipped = [(begin, crossing.nbytes) for (begin, _), crossing in boundaries.skips]
    back = [crossing.gradients.memory_bytes for crossing in boundaries.stage_boundaries]
    return Sizes(
        activation=_collapse_equal_sizes(sent),
        gradient=None if back == sent else _collapse_equal_sizes(back),
        saved=tuple(kept.saved for kept in found),
        deferred_wgrad=tuple(kept.deferred_wgrad for kept in found),
        saved_and_deferred=tuple(kept.saved_and_deferred for kept in found),
        checkpoint=tuple(kept.checkpoint for kept in found),
        params=tuple(kept.params for kept in found),
        grads=tuple(kept.grads for kept in found),
        optimizer=tuple(kept.optimizer for kept in found),
        buffers=tuple(kept.buffers for kept in found),
        version=tuple(kept.version for kept in found),
        skip=tuple(float(dict(skipped).get(s, 0)) for s in range(len(stages))) if skips else 0.0,
    )


def infer_boundaries(
    stages: Sequence[nn.Module],
    input: Tensor | Sequence[Tensor],
    *,
    keywords: Mapping[str, Any] = MappingProxyType({}),
    frozen_stages: int = 0,
    skips: Skips = (),
) -> dict[Edge, tuple[Boundary, ...]]:
    """What passes between stages, found by running them once, in order: of each stage but the last
    the tensors that it puts out, and those of each of the `skips`.  It is what an Executor takes as
    `boundary`.

    `input` is one microbatch of the first stage's, `keywords` what all stages are given by name
    for it.  A tensor has a gradient if it depends on something that is trained, or on what came in
    with one, and where nothing does so, if it can have one.  What the first `frozen_stages` stages
    give has none.

    Gradients, buffers and random numbers are left as they were.  Hooks run, and stages that talk
    within their tensor-parallel group do: all its ranks must call this.  Raises ModelError where a
    stage gives what is no tensor, or no tuple of tensors, and for arguments of another kind.

    >>> import torch
    >>> from torch import nn
    >>> from schedir.runtime import infer_boundaries
    >>> found = infer_boundaries([nn.Embedding(50, 32), nn.Linear(32, 50)], torch.ones(4, 8).long())
    >>> print(*found[0])
    [4, 8, 32] of torch.float32
    """
    stages, xs = require_model_stages(stages), _require_microbatch(input)
    found: dict[Edge, tuple[Boundary, ...]] = {}
    ends, skipped = dict(skips), dict[int, tuple[Tensor, ...]]()
    for s, module in enumerate(stages[:-1]):
        device = _find_stage_device(module, xs)
        xs, named = tree_map_only(Tensor, lambda x: x.to(device).detach(), (xs, dict(keywords)))  # noqa: B023
        skip = tuple(x.to(device) for x in skipped.pop(s, ()))
        if s:
            came = (*found[s - 1], *(one for b, e in skips if e == s for one in found[b, e]))
            xs = tuple(
                x.requires_grad_(bool(one.requires_grad))
                for x, one in zip((*xs, *skip), came, strict=True)
            )
        else:
            xs = tuple(x.clone() for x in xs)
        with preserve_buffers(module, device), torch.set_grad_enabled(s >= frozen_stages):
            y, _ = StageInputAdapter().run(
                module, xs, named, is_exclusive=True, skip_input_count=len(skip)
            )
        rest, given = split_skip_output(y, s) if s in ends else (require_output_tensors(y, s), ())
        ys = (*rest, *given)
        each = tuple(
            Boundary(tuple(y.shape), y.dtype, has and s >= frozen_stages)
            for y, has in zip(ys, infer_requires_grad(ys), strict=True)
        )
        own = tuple(y.detach().clone() for y in ys)
        found[s], xs = each[: len(rest)], own[: len(rest)]
        if s in ends:
            found[s, ends[s]], skipped[ends[s]] = each[len(rest) :], own[len(rest) :]
    return found


class _StageBytes(NamedTuple):
    """Bytes that one stage keeps."""

    saved: float = 0.0
    deferred_wgrad: float = 0.0
    saved_and_deferred: float = 0.0
    checkpoint: float = 0.0
    params: float = 0.0
    grads: float = 0.0
    optimizer: float = 0.0
    buffers: float = 0.0
    version: float = 0.0


class _StageInputs(NamedTuple):
    """What stages are run with."""

    xs: tuple[Tensor, ...]
    target: Tensor
    keywords: Mapping[str, Any]
    loss: Loss
    boundaries: ModelBoundaries
    optimizer_state: float | OptimizerFactory
    frozen_stages: int
    shard_spec: ShardSpec
    replicas: range  # of which the one with most counts


def _require_microbatch(value: object) -> tuple[Tensor, ...]:
    """The tensors of an input.  Raises ModelError for anything else."""
    try:
        return require_input_tensors(value, 0)
    except ModelError:
        raise ModelError(
            f"input is a microbatch, one tensor or a tuple of them, not {describe(value)}"
        ) from None


def _collapse_equal_sizes(sizes: list[int]) -> float | tuple[float, ...]:
    """What each stage puts out, the last nothing: a number where that of all others is one."""
    return float(sizes[0]) if len({*sizes}) == 1 else (*map(float, sizes), 0.0)


def _measure_stage(
    stages: Sequence[nn.Module | None], s: int, stage_inputs: _StageInputs
) -> _StageBytes:
    """What stage `s` keeps."""
    module, last, boundaries = stages[s], s == len(stages) - 1, stage_inputs.boundaries
    assert module is not None
    device = _find_stage_device(module, stage_inputs.xs)
    xs, target, keywords = tree_map_only(
        Tensor,
        lambda x: x.to(device),
        (stage_inputs.xs, stage_inputs.target, dict(stage_inputs.keywords)),
    )
    named = [x for x in tree_leaves(keywords) if isinstance(x, Tensor)]
    always = {*_measure_storages([*xs, *named, target, *module.parameters(), *module.buffers()])}

    def size(tensors: Iterable[Tensor]) -> int:
        return sum(n for at, n in _measure_storages(tensors).items() if at not in always)

    if s:
        xs = tuple(
            torch.zeros(one.shape, dtype=one.dtype, device=device).requires_grad_(
                bool(one.requires_grad) and begin >= stage_inputs.frozen_stages
            )
            for begin, one in boundaries.list_inputs(s)
        )
    packed: WeakSet[_PackedTensor] = WeakSet()  # what the graph has let go is not in it

    def pack(tensor: Tensor) -> _PackedTensor:
        # Detached: what a node saves of its own output would keep the node, for ever.
        packed.add(one := _PackedTensor(tensor.detach()))
        return one

    with _preserve_state(module, device), torch.set_grad_enabled(s >= stage_inputs.frozen_stages):
        with saved_tensors_hooks(pack, lambda one: one.tensor):
            # Of a model's own inputs, which are there, a module that writes gets a copy.
            lent, lender = xs if s else tuple(x.clone() for x in xs), StageInputAdapter()
            together = boundaries.count_skip_inputs(s)
            buffers = [(b, b.clone()) for b in module.buffers()]
            still = [p for p in module.parameters() if not p.requires_grad]
            sums = compute_checksums(still)
            y, _ = lender.run(module, lent, keywords, is_exclusive=True, skip_input_count=together)
            written = sum(b.nbytes for b, was in buffers if not has_same_bits(b, was))
            now = zip(still, sums, compute_checksums(still), strict=True)
            written += sum(p.nbytes for p, was, bits in now if bits != was)
            if not lender.writes_inputs[module.training]:
                always |= {*_measure_storages(lent)} - {*_measure_storages(xs if s else [])}
            ys = (
                (require_scalar_loss(stage_inputs.loss(y, target)),)
                if last
                else boundaries.make_output_validator(s)(y, s)
            )
        kept = [x for x in xs if x.requires_grad]
        tape = _PeakTape(
            lambda t: size([*kept, *(one.tensor for one in packed), *t.list_saved_tensors()])
        )
        saved = tape.max_bytes
        roots = [y for y in ys if y.requires_grad]
        if roots:
            with defer_weight_gradients(tape):
                torch.autograd.backward(roots, [torch.ones_like(y) * last for y in roots])
    trained = [p for p in module.parameters() if p.requires_grad]
    own = _measure_storages(trained)
    rest = _measure_storages([*module.parameters(), *module.buffers()])
    states = measure_model_states(
        module, stage_inputs.optimizer_state, stage_inputs.shard_spec, stage_inputs.replicas
    )
    return _StageBytes(
        saved=saved,
        deferred_wgrad=size(tape.list_saved_tensors()),
        saved_and_deferred=tape.max_bytes,
        checkpoint=size(xs) + written,
        params=states.params,
        grads=states.grads,
        optimizer=states.optimizer,
        buffers=sum(n for at, n in rest.items() if at not in own),
        version=sum(p.numel() * p.dtype.itemsize for p in trained),
    )


class _PeakTape(DeferredGradients):
    """A tape, and the most bytes of what is saved and what is on it that there were at once.

    That only grows as the tape does.
    """

    def __init__(self, measure_live_bytes: Callable[[DeferredGradients], int]) -> None:
        super().__init__()
        self.measure_live_bytes, self.max_bytes = measure_live_bytes, measure_live_bytes(self)

    def defer(self, *job: Any) -> None:
        super().defer(*job)
        self.max_bytes = max(self.max_bytes, self.measure_live_bytes(self))


class _PackedTensor:
    """A tensor that autograd saves."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _measure_storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Address and bytes of the memory of tensors that are all there, each once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def _find_stage_device(module: nn.Module, xs: Sequence[Tensor]) -> torch.device:
    """Where a stage is: where its parameters are, or else what it takes in."""
    tensors = (*module.parameters(), *xs)
    return tensors[0].device if tensors else torch.device("cpu")


@contextmanager
def _preserve_state(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Leaves gradients, buffers and the state of random numbers as they were."""
    gradients = [(p, p.grad) for p in module.parameters()]
    try:
        with preserve_buffers(module, device):
            for p, _ in gradients:
                p.grad = None
            yield
    finally:
        for p, gradient in gradients:
            p.grad = gradient
