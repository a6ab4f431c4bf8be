"""Measure the sizes and boundaries of a model by running one microbatch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map_only

from schedir.call_errors import explain_wrong_calls
from schedir.errors import ModelError, describe, describe_exception
from schedir.ir.cost.sizes import Sizes
from schedir.ir.cost.zero_states import ModelStates, zero_model_states
from schedir.ir.pipeline.skip_connections import Skips
from schedir.runtime.arguments import (
    require_loss,
    require_loss_input,
    require_model_stages,
    require_scalar_loss,
)
from schedir.runtime.autograd.preserved_state import preserve_module
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
from schedir.runtime.boundaries.microbatch_boundaries import PerMicrobatchBoundary
from schedir.runtime.model_checks.tensor_fingerprint import compute_checksums, has_same_bits
from schedir.runtime.parameters.buckets import BUCKET_BYTES, ShardSpec, make_buckets
from schedir.runtime.parameters.optimizer_inspection import unwrap_optimizer
from schedir.runtime.rank_resources import Loss
from schedir.runtime.step_inputs import require_input_tensors

# ---------------------------------------------------------------- training state

OptimizerFactory = Callable[[list[nn.Parameter]], Any]  # parameters -> their optimizer


def _count_gradient_bytes(p: nn.Parameter) -> float:
    return float(p.numel() * (p.grad_dtype or p.dtype).itemsize)


def measure_model_states(
    module: nn.Module,
    optimizer_state: float | OptimizerFactory,
    shard_spec: ShardSpec,
    replicas: range,
) -> ModelStates:
    """Return the bytes of a stage's trained parameters, their gradients and the optimizer state.

    All results are unsharded sizes, as in `measure_sizes`.

    Args:
        module: The module of the stage.
        optimizer_state: Bytes of optimizer state per trained element, or an optimizer factory.
        shard_spec: The number of replicas and the ZeRO level.
        replicas: The replicas whose shards are measured. The result uses the largest optimizer
            state of these replicas.
    """
    trained_parameters = [p for p in module.parameters() if p.requires_grad]
    storages = {x.data_ptr(): x.nbytes() for x in (p.untyped_storage() for p in trained_parameters)}
    params = float(sum(storages.values()))
    if shard_spec == ShardSpec():
        return ModelStates(
            params,
            float(sum(map(_count_gradient_bytes, trained_parameters))),
            _measure_optimizer_state(trained_parameters, optimizer_state),
        )
    tied_weight = getattr(module, "tied_weight", None)
    separate_parameters = [p for p in trained_parameters if p is tied_weight]
    buckets = make_buckets(
        trained_parameters, BUCKET_BYTES, shard_spec, separate_parameters, aligned=True
    )
    grads = float(sum(b.numel * b.grad_dtype.itemsize for b in buckets))
    if not shard_spec.zero:
        return ModelStates(
            params, grads, _measure_optimizer_state(trained_parameters, optimizer_state)
        )
    params = float(sum(b.numel * b.dtype.itemsize for b in buckets))
    max_state_bytes = 0.0
    for replica in replicas:
        shards = []
        for bucket in buckets:
            replica_spec = shard_spec._replace(replica=replica).for_tensor(bucket.parameters[0])
            for low, high, _ in bucket.list_shard_ranges(replica_spec.replica):
                if high > low:
                    shard = torch.empty(high - low, dtype=bucket.dtype, device="meta")
                    shards.append(nn.Parameter(shard))
                    shards[-1].grad_dtype = bucket.grad_dtype
        max_state_bytes = max(max_state_bytes, _measure_optimizer_state(shards, optimizer_state))
    return ModelStates(params, grads, shard_spec.replicas * max_state_bytes)


def _measure_optimizer_state(
    trained_parameters: Sequence[nn.Parameter], optimizer_state: float | OptimizerFactory
) -> float:
    """Return the bytes of an optimizer's state and main parameters after its first step.

    A factory gets parameters on the device "meta". So neither the parameters nor the optimizer
    state use memory.
    """
    if not callable(optimizer_state):
        return optimizer_state * sum(p.numel() for p in trained_parameters)
    if not trained_parameters:
        return 0.0
    parameters = []
    for p in trained_parameters:
        parameters.append(nn.Parameter(torch.empty_like(p, device="meta")))
        parameters[-1].grad_dtype = p.grad_dtype
        parameters[-1].grad = torch.empty_like(p, device="meta", dtype=p.grad_dtype or p.dtype)
    try:
        optimizer = optimizer_state(parameters)
        optimizer.step()
        state_values = [
            *getattr(optimizer, "main_parameters", ()),
            *tree_leaves([*unwrap_optimizer(optimizer).state.values()]),
        ]
    except Exception as error:
        raise ModelError(
            f"optimizer_state cannot be measured on the device 'meta': {describe_exception(error)}",
            hint="pass the bytes per trained element instead, such as optimizer_state=8.0",
        ) from error
    # All "meta" memory is at address 0, so distinguish tensors by their identity.
    tensors = {id(x): x for x in state_values if isinstance(x, Tensor)}
    return float(sum(x.untyped_storage().nbytes() for x in tensors.values()))


@explain_wrong_calls("measure_sizes(stages, input, target, loss=loss, boundary=boundary)")
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
    """Measure the sizes of a model's values by a forward and a backward of one microbatch.

    The sizes, in bytes, include:

    - `saved`: the input of a stage and the tensors that autograd saves. Each storage counts once.
      An activation checkpoint counts with the tensors that it keeps.
    - `deferred_wgrad`: the tensors that a BackwardInput keeps for its BackwardWeight.
    - `saved_and_deferred`: the largest sum of `saved` and `deferred_wgrad` at any time of a
      BackwardInput. Autograd frees saved tensors while the BackwardInput runs.
    - `recompute_inputs`: the tensors that a recomputed forward keeps for its second run. These are
      its inputs, and the buffers and frozen parameters that it writes to.
    - `params`, `grads` and `optimizer`: unsharded sizes. If a ZeRO level shards one of them, a
      replica has 1/dp of its size. With several replicas, `grads` includes the padding of buckets.
      From ZeRO level 1 on, `params` also includes this padding, and `optimizer` is `dp` times the
      largest optimizer state of a replica.

    Parameters, buffers, the input of the model and the target exist all the time. So `saved` and
    the other activation sizes exclude them. The function does not measure memory that an
    instruction needs only while it runs.

    The function restores gradients, buffers, plain attributes and random generators. The forwards
    also call the hooks of the modules. All ranks of a tensor-parallel group must call this
    function, because their stages communicate.

    Args:
        stages: All stages of the model, in order. The sizes of a stage that is None are 0.
        input: One microbatch for the first stage. Other stages get zeros.
        target: The target of the loss for this microbatch.
        loss: See `Executor`.
        boundary: See `Executor`. It must be for one microbatch, not a `PerMicrobatchBoundary`.
        optimizer_state: Bytes of optimizer state per trained element. The default of 8 is for the
            two float32 moments of AdamW. Alternatively, a function that creates an optimizer from
            parameters. Then the size includes all tensors that this optimizer has after one step,
            such as float32 main parameters and step counters.
        frozen_stages: The number of frozen stages. Frozen stages save nothing for a backward, and
            the stage after the last frozen stage computes no gradient of its input.
        keywords: Keyword arguments of all stages for this microbatch.
        dp: The number of replicas.
        zero: The ZeRO level.
        replica: The replica whose optimizer state is measured. By default the result is for the
            replica with the largest optimizer state.

    Returns:
        The sizes of each stage, in bytes.

    Raises:
        ModelError: The output of a stage does not match the boundary, the optimizer cannot step on
            the device "meta", or an argument is invalid.
        UsageError: `zero` or `dp` is invalid.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from schedir.runtime import measure_sizes
        >>> stages, x = [nn.Linear(64, 64), nn.Linear(64, 64)], torch.ones(8, 64)
        >>> sizes = measure_sizes(stages, x, x, loss=nn.functional.mse_loss, boundary=(8, 64))
        >>> sizes.activation, sizes.saved, sizes.params  # bytes; `saved` and `params` per stage
        (2048.0, (0.0, 4096.0), (16640.0, 16640.0))
        >>> sizes.for_stages("model_states", 2)  # bytes of weights, gradients and optimizer state
        array([66560., 66560.])
    """
    loss = require_loss(loss)
    if not isinstance(target, Tensor):
        raise ModelError(f"target must be one tensor, of one microbatch, not {describe(target)}")
    xs = _require_microbatch(input)
    stages = require_model_stages(stages, allow_missing=True)
    edges = boundary if isinstance(boundary, Mapping) else ()
    skips = tuple(sorted(edge for edge in edges if isinstance(edge, tuple)))
    if isinstance(boundary, PerMicrobatchBoundary):
        raise ModelError(
            f"the boundary has entries for {len(boundary.boundaries)} microbatches, but "
            "measure_sizes takes one microbatch",
            hint="call measure_sizes for each microbatch, with its own boundary",
        )
    boundaries = ModelBoundaries.from_edges(boundary, len(stages), skips=skips)
    zero_model_states(0, 0, 0, zero=zero, dp=dp)  # Raises UsageError if `zero` or `dp` is invalid.
    if replica is not None and replica not in range(dp):
        raise ModelError(f"replica must be from 0 to {dp - 1}, not {describe(replica)}")
    replicas = range(dp) if replica is None else range(replica, replica + 1)
    shard_spec = ShardSpec(dp, replicas[0], zero)
    stage_inputs = _StageInputs(
        xs, target, keywords, loss, boundaries, optimizer_state, frozen_stages, shard_spec, replicas
    )
    sizes_by_stage = [
        _measure_stage(stages, s, stage_inputs) if stage is not None else _StageBytes()
        for s, stage in enumerate(stages)
    ]
    activation_bytes = [crossing.memory_bytes for crossing in boundaries.stage_boundaries]
    skip_bytes = [(begin, crossing.nbytes) for (begin, _), crossing in boundaries.skips]
    gradient_bytes = [crossing.gradients.memory_bytes for crossing in boundaries.stage_boundaries]
    return Sizes(
        activation=_collapse_equal_sizes(activation_bytes),
        activation_grad=None
        if gradient_bytes == activation_bytes
        else _collapse_equal_sizes(gradient_bytes),
        **dict(zip(_StageBytes._fields, zip(*sizes_by_stage, strict=True), strict=True)),
        skip=tuple(float(dict(skip_bytes).get(s, 0)) for s in range(len(stages))) if skips else 0.0,
    )


def infer_boundaries(
    stages: Sequence[nn.Module],
    input: Tensor | Sequence[Tensor],
    *,
    keywords: Mapping[str, Any] = MappingProxyType({}),
    frozen_stages: int = 0,
    skips: Skips = (),
) -> dict[Edge, tuple[Boundary, ...]]:
    """Determine the boundaries of a model. Run the forwards of all stages except the last.

    A tensor has a gradient if it depends on trained parameters or on an input with a gradient. If
    no output of a stage depends on these, all outputs of a floating-point or complex dtype count as
    having a gradient. Outputs of frozen stages have no gradient.

    The function restores gradients, buffers, plain attributes and random generators. The forwards
    also call the hooks of the modules. All ranks of a tensor-parallel group must call this
    function, because their stages communicate.

    Args:
        stages: All stages of the model, in order.
        input: One microbatch for the first stage: a tensor or a tuple of tensors.
        keywords: Keyword arguments of all stages for this microbatch.
        frozen_stages: The number of frozen stages.
        skips: The skip connections, as pairs of source and target stage: `((0, 3),)`. The source
            stage returns the skip tensor after its output, and the target stage takes it as its
            last argument.

    Returns:
        Stage -> the boundaries of the tensors that it passes to the next stage, for all stages
        except the last. For a skip connection the key is the pair of its two stages. `Executor`
        takes this dict as `boundary`.

    Raises:
        ModelError: The output of a stage is neither a tensor nor a tuple of tensors, or an argument
            is invalid.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from schedir.runtime import infer_boundaries
        >>> found = infer_boundaries(
        ...     [nn.Embedding(50, 32), nn.Linear(32, 50)], torch.ones(4, 8).long())
        >>> print(*found[0])
        [4, 8, 32] of torch.float32
    """
    stages = require_model_stages(stages)
    xs = _require_microbatch(input)
    boundary_by_edge: dict[Edge, tuple[Boundary, ...]] = {}
    skip_ends = dict(skips)
    skip_tensors = dict[int, tuple[Tensor, ...]]()
    for s, module in enumerate(stages[:-1]):
        device = _find_stage_device(module, xs)
        arguments = (xs, dict(keywords))
        xs, stage_keywords = tree_map_only(Tensor, lambda x: x.to(device).detach(), arguments)  # noqa: B023
        skip_inputs = tuple(x.to(device) for x in skip_tensors.pop(s, ()))
        if s:
            edges: list[Edge] = [s - 1, *((begin, end) for begin, end in skips if end == s)]
            input_boundaries = [boundary for edge in edges for boundary in boundary_by_edge[edge]]
            xs = tuple(
                x.requires_grad_(bool(boundary.requires_grad))
                for x, boundary in zip((*xs, *skip_inputs), input_boundaries, strict=True)
            )
        else:
            xs = tuple(x.clone() for x in xs)
        with preserve_module(module, device), torch.set_grad_enabled(s >= frozen_stages):
            y, _ = StageInputAdapter().run(
                module, xs, stage_keywords, is_exclusive=True, skip_input_count=len(skip_inputs)
            )
        skip_outputs: Sequence[Tensor] = ()
        if s in skip_ends:
            main_outputs, skip_outputs = split_skip_output(y, s)
        else:
            main_outputs = require_output_tensors(y, s)
        ys = (*main_outputs, *skip_outputs)
        output_boundaries = tuple(
            Boundary(tuple(y.shape), y.dtype, requires_grad and s >= frozen_stages)
            for y, requires_grad in zip(ys, infer_requires_grad(ys), strict=True)
        )
        output_copies = tuple(y.detach().clone() for y in ys)
        boundary_by_edge[s] = output_boundaries[: len(main_outputs)]
        xs = output_copies[: len(main_outputs)]
        if s in skip_ends:
            boundary_by_edge[s, skip_ends[s]] = output_boundaries[len(main_outputs) :]
            skip_tensors[skip_ends[s]] = output_copies[len(main_outputs) :]
    return boundary_by_edge


class _StageBytes(NamedTuple):
    saved: float = 0.0
    deferred_wgrad: float = 0.0
    saved_and_deferred: float = 0.0
    recompute_inputs: float = 0.0
    params: float = 0.0
    grads: float = 0.0
    optimizer: float = 0.0
    buffers: float = 0.0
    version: float = 0.0


class _StageInputs(NamedTuple):
    """The arguments of `measure_sizes` that all stages use."""

    xs: tuple[Tensor, ...]
    target: Tensor
    keywords: Mapping[str, Any]
    loss: Loss
    boundaries: ModelBoundaries
    optimizer_state: float | OptimizerFactory
    frozen_stages: int
    shard_spec: ShardSpec
    replicas: range  # the sizes have the largest optimizer state of these replicas


def _require_microbatch(value: object) -> tuple[Tensor, ...]:
    """Return the tensors of an input microbatch, or raise ModelError for any other value."""
    try:
        return require_input_tensors(value, 0)
    except ModelError:
        raise ModelError(
            f"input must be a tensor or a tuple of tensors, not {describe(value)}"
        ) from None


def _collapse_equal_sizes(sizes: list[int]) -> float | tuple[float, ...]:
    """Return one number if all sizes are equal, or else all sizes and a 0 for the last stage."""
    return float(sizes[0]) if len({*sizes}) == 1 else (*map(float, sizes), 0.0)


def _measure_stage(
    stages: Sequence[nn.Module | None], s: int, stage_inputs: _StageInputs
) -> _StageBytes:
    module, is_last, boundaries = stages[s], s == len(stages) - 1, stage_inputs.boundaries
    assert module is not None
    device = _find_stage_device(module, stage_inputs.xs)
    xs, target, keywords = tree_map_only(
        Tensor,
        lambda x: x.to(device),
        (stage_inputs.xs, stage_inputs.target, dict(stage_inputs.keywords)),
    )
    keyword_tensors = [x for x in tree_leaves(keywords) if isinstance(x, Tensor)]
    stage_tensors = [*module.parameters(), *module.buffers()]
    excluded_storages = {*_measure_storages([*xs, *keyword_tensors, target, *stage_tensors])}

    def count_bytes(tensors: Iterable[Tensor]) -> int:
        storages = _measure_storages(tensors)
        return sum(n for address, n in storages.items() if address not in excluded_storages)

    if s:
        xs = _make_zero_inputs(s, stage_inputs, device)
    # A WeakSet contains only the tensors that autograd has not freed.
    packed_tensors: WeakSet[_PackedTensor] = WeakSet()

    def pack(tensor: Tensor) -> _PackedTensor:
        # Without detach, a node that saves its output would be in a reference cycle.
        packed_tensors.add(packed_tensor := _PackedTensor(tensor.detach()))
        return packed_tensor

    with preserve_module(module, device), torch.set_grad_enabled(s >= stage_inputs.frozen_stages):
        with saved_tensors_hooks(pack, lambda packed_tensor: packed_tensor.tensor):
            # The module may write to its inputs, so it gets copies of the inputs of the model.
            args, adapter = xs if s else tuple(x.clone() for x in xs), StageInputAdapter()
            skip_inputs = boundaries.count_skip_inputs(s)
            writes = _ModuleWrites(module)
            y, _ = adapter.run(
                module, args, keywords, is_exclusive=True, skip_input_count=skip_inputs
            )
            written_bytes = writes.count_bytes()
            if not adapter.writes_inputs[module.training]:
                input_storages = _measure_storages(xs if s else [])
                excluded_storages |= {*_measure_storages(args)} - {*input_storages}
            if is_last:
                require_loss_input(y, s)
            ys = (
                (require_scalar_loss(stage_inputs.loss(y, target)),)
                if is_last
                else boundaries.make_output_validator(s)(y, s)
            )
        inputs = [x for x in xs if x.requires_grad]

        def measure_live_bytes(gradients: DeferredGradients) -> int:
            saved = [packed_tensor.tensor for packed_tensor in packed_tensors]
            return count_bytes([*inputs, *saved, *gradients.list_saved_tensors()])

        tape = _PeakTape(measure_live_bytes)
        saved_bytes = tape.max_bytes
        roots = [y for y in ys if y.requires_grad]
        if roots:
            with defer_weight_gradients(tape):
                torch.autograd.backward(roots, [torch.ones_like(y) * is_last for y in roots])
    return _StageBytes(
        saved=saved_bytes,
        deferred_wgrad=count_bytes(tape.list_saved_tensors()),
        saved_and_deferred=tape.max_bytes,
        recompute_inputs=count_bytes(xs) + written_bytes,
        **_measure_parameters(module, stage_inputs),
    )


def _measure_parameters(module: nn.Module, stage_inputs: _StageInputs) -> dict[str, float]:
    """Return the sizes of a stage's parameters, buffers and states, as fields of `_StageBytes`."""
    trained_parameters = [p for p in module.parameters() if p.requires_grad]
    trained_storages = _measure_storages(trained_parameters)
    stage_storages = _measure_storages([*module.parameters(), *module.buffers()])
    states = measure_model_states(
        module, stage_inputs.optimizer_state, stage_inputs.shard_spec, stage_inputs.replicas
    )
    return {
        "params": states.params,
        "grads": states.grads,
        "optimizer": states.optimizer,
        "buffers": sum(
            n for address, n in stage_storages.items() if address not in trained_storages
        ),
        "version": sum(p.numel() * p.dtype.itemsize for p in trained_parameters),
    }


def _make_zero_inputs(
    s: int, stage_inputs: _StageInputs, device: torch.device
) -> tuple[Tensor, ...]:
    """Return inputs of zeros for stage `s`, which is not the first stage."""
    return tuple(
        torch.zeros(boundary.shape, dtype=boundary.dtype, device=device).requires_grad_(
            bool(boundary.requires_grad) and begin >= stage_inputs.frozen_stages
        )
        for begin, boundary in stage_inputs.boundaries.list_inputs(s)
    )


class _ModuleWrites:
    """Counts the bytes of the buffers and frozen parameters that a module writes to."""

    def __init__(self, module: nn.Module) -> None:
        self.buffers = [(b, b.clone()) for b in module.buffers()]
        self.frozen_parameters = [p for p in module.parameters() if not p.requires_grad]
        self.checksums = compute_checksums(self.frozen_parameters)

    def count_bytes(self) -> int:
        """Return the bytes of the tensors that have changed since the counter was created."""
        written_bytes = sum(
            b.nbytes for b, original in self.buffers if not has_same_bits(b, original)
        )
        new_checksums = compute_checksums(self.frozen_parameters)
        rows = zip(self.frozen_parameters, self.checksums, new_checksums, strict=True)
        return written_bytes + sum(p.nbytes for p, before, after in rows if after != before)


class _PeakTape(DeferredGradients):
    """Deferred weight gradients that measure the bytes of saved tensors and deferred gradients.

    The attribute `max_bytes` is the largest measured sum. The sum grows only when a gradient is
    deferred, so `defer` measures it.
    """

    def __init__(self, measure_live_bytes: Callable[[DeferredGradients], int]) -> None:
        super().__init__()
        self.measure_live_bytes = measure_live_bytes
        self.max_bytes = measure_live_bytes(self)

    def defer(self, *job: Any) -> None:
        super().defer(*job)
        self.max_bytes = max(self.max_bytes, self.measure_live_bytes(self))


class _PackedTensor:
    """A wrapper of a saved tensor, for a WeakSet. Only the autograd graph keeps the wrapper alive.

    Other code may keep the tensor itself alive.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _measure_storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return a dict: address -> bytes, for each storage that the tensors use."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def _find_stage_device(module: nn.Module, xs: Sequence[Tensor]) -> torch.device:
    """Return the device of a stage's parameters, or of its inputs if it has no parameters."""
    tensors = (*module.parameters(), *xs)
    return tensors[0].device if tensors else torch.device("cpu")
