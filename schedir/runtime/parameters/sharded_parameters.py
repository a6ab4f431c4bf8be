"""Shard the weights of a stage over replicas, by bucket (ZeRO).

Between steps the `data` of a parameter is this replica's shard of it, 1-dim and possibly empty. Its
`grad` is a shard, too. So the optimizer updates only shards, and code between steps cannot read
outdated full weights.

Within a step `data` is a view of the full weights in the bucket's flat tensor. `start_unshard`
gathers the full weights. They are valid from `finish_unshard` to `reshard`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from schedir.errors import ModelError, describe_exception
from schedir.runtime.model_checks.storage_references import StorageReferences
from schedir.runtime.model_checks.tensor_fingerprint import compute_checksums
from schedir.runtime.parameters.buckets import Bucket, ShardSpec
from schedir.runtime.parameters.gradient_buffers import GradientBuffers
from schedir.runtime.parameters.optimizer_inspection import (
    find_optimizers,
    has_step_hooks,
    is_torch_optimizer,
    map_main_parameters,
    unwrap_optimizer,
)
from schedir.transports.collectives import CollectiveName, GroupKey
from schedir.transports.transport import Work

StartCollective = Callable[[CollectiveName, GroupKey, Tensor, Tensor], Work]
_OWNER_ATTRIBUTE: Final = "_schedir_parts"  # the parameter's attribute that refers to its owner
_ALL_INSTANCES: Final = WeakSet["ShardedParameters"]()  # all instances of this process


class ShardedParameters:
    """The trained weights of a stage that ZeRO shards, in the same buckets as its gradients.

    Without ZeRO, and for a frozen stage, there are no such weights and no buckets.

    Up to ZeRO level 2 the flat tensors of full weights stay allocated, and each shard is a view of
    its flat tensor. At level 3 the shards have separate memory, and the flat tensors have memory
    only while the weights are unsharded.

    Args:
        gradients: The gradient buffers of the stage.
        shard_spec: The number of replicas, the index of this replica, and the ZeRO level.
        aliases: Parameter of this stage -> the parameter of another stage in the same memory. Both
            parameters are gathered from the other stage's shard.
    """

    def __init__(
        self,
        gradients: GradientBuffers,
        shard_spec: ShardSpec,
        aliases: Mapping[nn.Parameter, nn.Parameter],
    ) -> None:
        self.gradients = gradients
        self.shard_spec = shard_spec
        self.aliases = aliases
        self.is_sharded: bool = shard_spec.zero > 0
        self.buckets: list[Bucket] = gradients.buckets if self.is_sharded else []
        self.keeps_full_weights: bool = not shard_spec.shards_state("params")
        self.flat: list[Tensor] = []
        self.shards: list[Tensor] = []  # for each bucket, the shard of this replica
        self.full_views: list[tuple[nn.Parameter, Tensor]] = []
        self.parameter_shards: dict[nn.Parameter, Tensor] = {}
        self.gather_works: list[Work] = []
        self.is_unsharded: bool = False
        self.is_in_step: bool = False
        self.summoned_flat: list[Tensor] = []  # full weights that users see between steps
        self.versions: list[int] = []  # version counters of `full_views` when the step began
        self.references: StorageReferences = StorageReferences(())  # counted before the first step
        self.steps: int = 0  # the number of training steps that have begun
        self.checksums: list[int] = []  # of each bucket's full weights, in the first step

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Pickle as None: a copied or unpickled parameter has no owner."""
        return type(None), ()

    @torch.no_grad()
    def shard_weights(self, alias_shards: Mapping[nn.Parameter, Tensor]) -> None:
        """Copy the weights into buckets, and replace the data of each parameter by its shard.

        Args:
            alias_shards: For the stages that are already sharded: the first parameter of a bucket
                -> the bucket's shard. A parameter that is a value of `aliases` is alone in its
                bucket.
        """
        for bucket in self.buckets:
            flat = torch.zeros(bucket.numel, dtype=bucket.dtype, device=bucket.device)
            views = bucket.views(flat)
            for p, view in zip(bucket.parameters, views, strict=True):
                view.copy_(p)
            shard = bucket.get_shard(flat)
            if self.aliases.get(bucket.parameters[0]) in alias_shards:
                shard = alias_shards[self.aliases[bucket.parameters[0]]]
            elif not self.keeps_full_weights:
                shard = shard.clone()
            if not self.keeps_full_weights:
                flat.untyped_storage().resize_(0)
            self.flat.append(flat)
            self.shards.append(shard)
            self.full_views += zip(bucket.parameters, views, strict=True)
            self.parameter_shards |= zip(bucket.parameters, bucket.split_shard(shard), strict=True)
            # Free the full weights of each bucket before the next bucket is copied, to keep the
            # peak of memory low.
            for p in bucket.parameters:
                p.grad = None
                p.data = self.parameter_shards[p]
                vars(p)[_OWNER_ATTRIBUTE] = self
        for owner in self.gradients.module.modules():
            if any(p in self.parameter_shards for p in owner.parameters(recurse=False)):
                owner.register_state_dict_pre_hook(_warn_of_shards)
        self.is_in_step = True
        self.to_resting_state()
        _ALL_INSTANCES.add(self)

    def list_other_weights(self) -> dict[int, Tensor]:
        """Return a dict: `_cdata` of storage -> full weights, for other stages at ZeRO level 3.

        `_cdata` is an address. The caller must keep the result while it compares addresses.
        Otherwise the garbage collector may free a stage, and a new tensor may get the same address.
        """
        return {
            flat.untyped_storage()._cdata: flat
            for instance in _ALL_INSTANCES
            if instance is not self and not instance.keeps_full_weights
            for flat in instance.flat
        }

    def begin_step(self, *, has_backward: bool) -> None:
        """Begin a step: give parameters their full shapes. Values are valid after `finish_unshard`.

        Args:
            has_backward: True if it is a training step.

        Raises:
            ModelError: The data of a parameter was replaced, or `write_back` was not called after
                `summon_full`.
        """
        self._require_shards()
        self.is_in_step = True
        self.steps = self.steps + has_backward
        for p, view in self.full_views:
            p.grad = None
            p.data = view
        self.versions = [p._version for p, _ in self.full_views]

    def _require_shards(self) -> None:
        if self.summoned_flat:
            raise ModelError(
                "weights are unsharded within full_parameters(), but a step needs sharded weights",
                hint="leave `with executor.full_parameters():` before the next step",
            )
        for p, shard in self.parameter_shards.items():
            if p.data_ptr() != shard.data_ptr() or p.shape != shard.shape:
                raise ModelError(
                    f"{self.gradients.names[p]} is not the shard of this replica: it was moved, "
                    "or its data were replaced",
                    hint="write to weights within `with executor.full_parameters():`",
                )

    def start_unshard(self, collective: StartCollective) -> None:
        """Start to gather the full weights.

        Args:
            collective: Starts a collective, see `Transport.start_collective`.
        """
        for bucket, flat, shard in zip(self.buckets, self.flat, self.shards, strict=True):
            if not self.keeps_full_weights:
                flat.untyped_storage().resize_(flat.nbytes)
            if bucket.shard_spec.replicas > 1 and flat.numel():
                group = bucket.get_group("params")
                self.gather_works.append(collective("all_gather", group, flat, shard))
            elif flat.data_ptr() != shard.data_ptr():
                flat.copy_(shard)
        self.is_unsharded = True

    def finish_unshard(self) -> None:
        """Wait until the full weights are gathered."""
        assert self.is_unsharded, "the checker proves that an unshard comes before each use"
        for work in self.gather_works:
            work.wait()
        if self.steps == 1 and not self.keeps_full_weights and not self.checksums:
            self.checksums = compute_checksums(self.flat)
        self.gather_works.clear()

    def clone_if_in_weights(self, values: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return values that stay valid after `reshard`.

        Args:
            values: Tensors. Some may be views of full weights, whose memory `reshard` frees, if
                `keeps_full_weights` is False.

        Returns:
            The values, with a copy in place of each such view.
        """
        weight_addresses = {flat.untyped_storage().data_ptr() for flat in self.flat}
        return [
            v.clone() if v.untyped_storage().data_ptr() in weight_addresses else v for v in values
        ]

    def reshard(self) -> None:
        """End the use of the full weights.

        At ZeRO level 3, the method frees the full weights, so that only this replica's shard
        remains. A write to elements of another replica's shard would be lost. Version counters do
        not show a write to `data`, so the first step also compares checksums.

        Raises:
            ModelError: The stage wrote to a weight.
        """
        self.finish_unshard()
        self.is_unsharded = False
        if self.checksums and self.checksums != (new_checksums := compute_checksums(self.flat)):
            k = next(k for k, old in enumerate(self.checksums) if old != new_checksums[k])
            self.require_unwritten()
            names = [self.gradients.names[p] for p in self.buckets[k].parameters]
            raise _write_error(f"one of {names[0]} to {names[-1]}" if names[1:] else names[0])
        self.checksums = []
        for flat in () if self.keeps_full_weights else self.flat:
            flat.untyped_storage().resize_(0)

    def to_resting_state(self) -> None:
        """Set the data and gradient of each parameter to this replica's shards.

        The gradient is a shard of the reduced gradient. The call has no effect between steps, or
        between `summon_full` and `write_back`.
        """
        if not self.is_in_step or self.summoned_flat:
            return
        self.is_in_step = False
        for p, shard in self.parameter_shards.items():
            p.grad = None
            p.data = shard
            (gradient_shard,) = self.gradients.shard_views[p]
            p.grad = gradient_shard if shard.numel() else None

    def require_unwritten(self) -> None:
        """Raise ModelError if a step wrote to a weight or replaced its `data`.

        Each replica keeps only its shard, and would lose a write to other elements.
        """
        new_versions = [p._version for p, _ in self.full_views]
        for (p, view), old_version, new_version in zip(
            self.full_views, self.versions, new_versions, strict=True
        ):
            if old_version != new_version:
                raise _write_error(self.gradients.names[p])
            if self.is_in_step and p.data_ptr() != view.data_ptr():
                raise _write_error(f"the data of {self.gradients.names[p]}")

    def count_references(self) -> None:
        """Count the references to the memory of full weights, before weights are gathered."""
        self.references = StorageReferences(() if self.keeps_full_weights else self.flat)

    def require_released(self) -> None:
        """Raise ModelError if a stage keeps a reference to full weights, which `reshard` frees."""
        for k in self.references.find_increased():
            raise ModelError(
                "a stage keeps a reference to the full weight "
                f"{self.gradients.names[self.buckets[k].parameters[0]]}, or to another weight of "
                "its bucket, but ZeRO level 3 frees full weights after the step",
                hint="keep a detached copy: weight.detach().clone(); or zero=2",
            )

    def summon_full(self, collective: StartCollective) -> None:
        """Replace the shards by full weights between steps, until `write_back`.

        Full weights get new memory here, because users may keep references to it, for example by
        `numpy()`.

        Args:
            collective: Starts a collective, see `Transport.start_collective`.

        Raises:
            ModelError: The data of a parameter was replaced, or `summon_full` was already called.
        """
        self._require_shards()
        self.summoned_flat = [
            shard.new_zeros(bucket.numel)
            for bucket, shard in zip(self.buckets, self.shards, strict=True)
        ]
        for bucket, flat, shard in zip(self.buckets, self.summoned_flat, self.shards, strict=True):
            if bucket.shard_spec.replicas > 1 and flat.numel():
                collective("all_gather", bucket.get_group("params"), flat, shard).wait()
            else:
                flat.copy_(shard)
        for bucket, flat in zip(self.buckets, self.summoned_flat, strict=True):
            for p, view in zip(bucket.parameters, bucket.views(flat), strict=True):
                p.grad = None
                p.data = view

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy this replica's shards from the full weights, and set parameters to the shards.

        Raises:
            ModelError: The shape, type or device of a parameter has changed.
        """
        summoned_flat = self.summoned_flat
        self.summoned_flat = []
        self.is_in_step = True
        try:
            for p, view in self.full_views:
                if p.shape != view.shape or p.dtype != view.dtype or p.device != view.device:
                    raise ModelError(
                        f"{self.gradients.names[p]} was {list(view.shape)} of {view.dtype} on "
                        f"{view.device}, and is now {list(p.shape)} of {p.dtype} on {p.device}",
                        hint="create the executor after the last such change",
                    )
            for bucket, flat, shard in zip(self.buckets, summoned_flat, self.shards, strict=True):
                for p, view in zip(bucket.parameters, bucket.views(flat), strict=True):
                    if p.data_ptr() != view.data_ptr():
                        view.copy_(p)
                if bucket.parameters[0] not in self.aliases:  # another stage writes the shard
                    shard.copy_(bucket.get_shard(flat))
        finally:
            self.to_resting_state()


def _warn_of_shards(module: nn.Module, *_: object) -> None:
    """Warn users that the state dict of a module has shards between steps."""
    for name, p in module.named_parameters(recurse=False):
        owner = find_owner(p)
        if owner is not None and not owner.summoned_flat and not owner.is_in_step:
            warnings.warn(
                f"the state_dict has only this replica's shard of {name} (zero "
                f"{owner.shard_spec.zero}): call state_dict within "
                "`with executor.full_parameters():` to get full weights",
                stacklevel=2,
            )
            return


def _write_error(subject: str) -> ModelError:
    return ModelError(
        f"a forward or a backward writes to {subject}, but each replica has only a shard of it",
        hint="make it a buffer, or set zero=0",
    )


def find_owner(p: nn.Parameter) -> ShardedParameters | None:
    """Return the owner of a sharded parameter, or None if the parameter is not sharded.

    Args:
        p: The parameter.
    """
    owner = vars(p).get(_OWNER_ATTRIBUTE)
    return owner if isinstance(owner, ShardedParameters) and p in owner.parameter_shards else None


def shard_optimizer_state(
    optimizer: Any, shard_ranges: Mapping[nn.Parameter, tuple[torch.Size, int, int]]
) -> None:
    """Shard the state of an optimizer that was created for full weights.

    State tensors with the shape of a weight keep only the elements of the shard. The same holds for
    the main parameters of a MainOptimizer.

    Args:
        optimizer: The optimizer, or an object with optimizers in its attributes.
        shard_ranges: For each parameter, its full shape, and the begin and end of its shard as
            indices of elements. The end is excluded.
    """
    for each_optimizer in find_optimizers(optimizer):
        parameter_of_main = map_main_parameters(each_optimizer)
        for main, p in parameter_of_main.items():
            if p in shard_ranges:
                main.grad, main.data = None, _take_shard(main.data, *shard_ranges[p])
        state = getattr(unwrap_optimizer(each_optimizer), "state", {})
        for p in [*state]:
            if (shard_range := shard_ranges.get(parameter_of_main.get(p, p))) is None:
                continue
            for name, value in [*state[p].items()]:
                state[p][name] = tree_map_only(Tensor, partial(_shard_like, shard_range), value)


def _shard_like(shard_range: tuple[torch.Size, int, int], value: Tensor) -> Tensor:
    """Return the shard of a state tensor that has the full shape of its weight."""
    return _take_shard(value, *shard_range) if value.shape == shard_range[0] else value


def require_sharded_state(optimizer: Any, shapes: Mapping[Any, torch.Size]) -> None:
    """Check that state tensors of an optimizer have the shapes of the shards of their weights.

    The state may still have the full shape of the weight. torch's fused optimizers would then use
    the first elements of the state, which may belong to another shard.

    Args:
        optimizer: The optimizer, or an object with optimizers in its attributes.
        shapes: The full shapes of sharded parameters. State of other parameters is not checked.

    Raises:
        ModelError: A state tensor with several elements has another shape than the parameter.
    """
    for each_optimizer in find_optimizers(optimizer):
        parameter_of_main = map_main_parameters(each_optimizer)
        inner = unwrap_optimizer(each_optimizer)
        for p, parameter_state in getattr(inner, "state", {}).items():
            shape = shapes.get(parameter_of_main.get(p, p))
            if shape is None:
                continue
            for name, value in list_state_tensors(parameter_state):
                if value.shape != p.shape:
                    raise ModelError(
                        f"{type(inner).__name__} keeps {name} of shape {list(value.shape)} for a "
                        f"weight shard of shape {list(p.shape)}",
                        hint="load the state that this replica saved, or load the full state "
                        "before the executor is created",
                    )


@contextmanager
def guard_shard_step(optimizer: object, zero: int) -> Iterator[None]:
    """Return a context for an optimizer step. The step updates shards if `zero` is not 0.

    Hooks on the step would get shards instead of full weights. So they are allowed only if the
    optimizer's attribute `elementwise` is True.

    Args:
        optimizer: The optimizer.
        zero: The ZeRO level.

    Raises:
        ModelError: `zero` is not 0, and the step has hooks but `elementwise` is not True. Or `zero`
            is not 0, and the step of an optimizer that is not torch's fails.
    """
    for each_optimizer in map(unwrap_optimizer, find_optimizers(optimizer) if zero else ()):
        if has_step_hooks(each_optimizer) and not getattr(each_optimizer, "elementwise", False):
            raise ModelError(
                f"{type(each_optimizer).__name__} has hooks on its step, but they would get "
                f"shards of weights and gradients (zero {zero})",
                hint="zero=0; or optimizer.elementwise = True, if the hooks are elementwise",
            )
    try:
        yield
    except RuntimeError as error:
        inner = unwrap_optimizer(optimizer)
        if not zero or is_torch_optimizer(inner):
            raise
        raise ModelError(
            f"{type(inner).__name__} failed to step shards of weights, which have one dimension "
            f"(zero {zero}): {describe_exception(error)}",
            hint=f"in {type(inner).__name__}.step, create the state of each parameter p in the "
            "shape that p has there; or zero=0",
        ) from error


def list_state_tensors(state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and tensor of each state tensor with several elements.

    Args:
        state: An optimizer's state of one parameter.
    """
    for name, value in state.items():
        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor) and leaf.numel() > 1:
                yield name, leaf


def _take_shard(full: Tensor, shape: torch.Size, low: int, high: int) -> Tensor:
    assert full.shape == shape
    return full.detach().reshape(-1)[low:high].clone()
