"""Shard the weights of a stage over replicas, by bucket (ZeRO).

Between steps a parameter's `data` is the replica's own piece of it, 1-dim and perhaps empty, and so
is its `grad`: an optimizer that was made of the stage's parameters steps pieces, and nobody can
take old weights for whole ones.  Within a step `data` is whole, in the bucket's flat tensor, which
is gathered by `start_unshard` and of use from `whole` until `reshard`.
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
from schedir.runtime.parameters.buckets import ShardSpec
from schedir.runtime.parameters.gradient_buffers import GradientBuffers
from schedir.runtime.parameters.mixed_precision import (
    MainOptimizer,
    find_optimizers,
    has_step_hooks,
    is_torch_optimizer,
    unwrap_optimizer,
)
from schedir.transports.collectives import CollectiveName, GroupKey
from schedir.transports.transport import Work

StartCollective = Callable[[CollectiveName, GroupKey, Tensor, Tensor], Work]
_OWNER_ATTRIBUTE: Final = "_schedir_parts"  # an attribute of parameters
_ALL_INSTANCES: Final = WeakSet["ShardedParameters"]()  # of this process


class ShardedParameters:
    """The trained weights of a stage, in the buckets of its gradients.

    Up to level 2 of ZeRO the flat tensors stay, and the own part lies in its place there; at level
    3 it has memory of its own, and theirs is there while the weights are whole.  `aliases` are
    parameters of the stage in the memory of another stage's: they are gathered from its part.
    """

    def __init__(
        self,
        gradients: GradientBuffers,
        shard_spec: ShardSpec,
        aliases: Mapping[nn.Parameter, nn.Parameter],
    ) -> None:
        self.gradients, self.shard_spec, self.aliases = gradients, shard_spec, aliases
        self.buckets, self.keeps_full_weights = (
            gradients.buckets,
            not shard_spec.shards_state("params"),
        )
        self.flat: list[Tensor] = []
        self.shards: list[Tensor] = []  # the replica's part of each
        self.full_views: list[tuple[nn.Parameter, Tensor]] = []
        self.parameter_shards: dict[nn.Parameter, Tensor] = {}
        self.gather_works: list[Work] = []
        self.is_unsharded = self.is_in_step = False
        self.summoned_flat: list[Tensor] = []  # flat tensors that are shown whole between steps
        self.versions: list[int] = []  # of each parameter when a step began
        self.references = StorageReferences(())  # to full weights, before the first step
        self.steps = 0  # that have begun, and train
        self.checksums: list[int] = []  # of the bits that were gathered, in the first step

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A copy of a parameter, or one that is pickled, is nobody's piece."""
        return type(None), ()

    @torch.no_grad()
    def shard_weights(self, alias_shards: Mapping[nn.Parameter, Tensor]) -> None:
        """Take the weights, and let each parameter be its own piece; `alias_shards` are the parts
        of buckets of one parameter that other stages have."""
        k = self.shard_spec.replica
        for bucket in self.buckets:
            flat = torch.zeros(bucket.numel, dtype=bucket.dtype, device=bucket.device)
            views = bucket.views(flat)
            for p, view in zip(bucket.parameters, views, strict=True):
                view.copy_(p)
            own = bucket.get_shard(flat, k)
            if self.aliases.get(bucket.parameters[0]) in alias_shards:
                own = alias_shards[self.aliases[bucket.parameters[0]]]
            elif not self.keeps_full_weights:
                own = own.clone()
            if not self.keeps_full_weights:
                flat.untyped_storage().resize_(0)
            self.flat.append(flat)
            self.shards.append(own)
            self.full_views += zip(bucket.parameters, views, strict=True)
            self.parameter_shards |= zip(bucket.parameters, bucket.split_shard(own, k), strict=True)
            for p in bucket.parameters:  # one after the other, so that the rest may go
                p.grad = None
                p.data = self.parameter_shards[p]
                vars(p)[_OWNER_ATTRIBUTE] = self
        for owner in self.gradients.module.modules():
            if any(p in self.parameter_shards for p in owner.parameters(recurse=False)):
                owner.register_state_dict_pre_hook(_warn_of_shards)
        self.is_in_step = True
        self.to_resting_state()
        _ALL_INSTANCES.add(self)

    def list_other_storages(self) -> frozenset[int]:
        """Return the storages, by `_cdata`, of the full weights of all other stages."""
        return frozenset(
            flat.untyped_storage()._cdata
            for parts in _ALL_INSTANCES
            if parts is not self and not parts.keeps_full_weights
            for flat in parts.flat
        )

    def begin_step(self, *, has_backward: bool) -> None:
        """Begin a step: parameters are of their shapes, and whole when they are gathered.

        Raises ModelError for one whose `data` is not its piece any more.
        """
        self._require_shards()
        self.is_in_step, self.steps = True, self.steps + has_backward
        for p, view in self.full_views:
            p.grad = None
            p.data = view
        self.versions = [p._version for p, _ in self.full_views]

    def _require_shards(self) -> None:
        if self.summoned_flat:
            raise ModelError(
                "weights are shown whole, and a step keeps them in parts",
                hint="leave `with executor.whole():` before the next step",
            )
        for p, piece in self.parameter_shards.items():
            if p.data_ptr() != piece.data_ptr() or p.shape != piece.shape:
                raise ModelError(
                    f"{self.gradients.names[p]} is not the piece that this replica keeps of it: "
                    "it has been moved, or its data set",
                    hint="write to weights within `with executor.whole():`",
                )

    def start_unshard(self, collective: StartCollective) -> None:
        """Begin to make the weights whole."""
        for flat, own in zip(self.flat, self.shards, strict=True):
            if not self.keeps_full_weights:
                flat.untyped_storage().resize_(flat.nbytes)
            if self.shard_spec.replicas > 1 and flat.numel():
                self.gather_works.append(collective("all_gather", "params", flat, own))
            elif flat.data_ptr() != own.data_ptr():
                flat.copy_(own)
        self.is_unsharded = True

    def finish_unshard(self) -> None:
        """Wait until they are."""
        assert self.is_unsharded, (
            "the checker proves that whoever needs them comes behind an unshard"
        )
        for work in self.gather_works:
            work.wait()
        if self.steps == 1 and not self.keeps_full_weights and not self.checksums:
            self.checksums = compute_checksums(self.flat)
        self.gather_works.clear()

    def clone_if_in_weights(self, values: Sequence[Tensor]) -> Sequence[Tensor]:
        """Values that outlive the whole weights: copies of those in memory that is let go."""
        flats = () if self.keeps_full_weights else self.flat
        places = {flat.untyped_storage().data_ptr() for flat in flats}
        return [v.clone() if v.untyped_storage().data_ptr() in places else v for v in values]

    def reshard(self) -> None:
        """Keep the own part only.

        What somebody wrote elsewhere would be lost.  Versions do not tell of a write to `data`, so
        in the first step the bits are looked at.
        """
        self.finish_unshard()
        self.is_unsharded = False
        if self.checksums and self.checksums != (now := compute_checksums(self.flat)):
            k = next(k for k, before in enumerate(self.checksums) if before != now[k])
            self.require_unwritten()
            names = [self.gradients.names[p] for p in self.buckets[k].parameters]
            raise _write_error(f"one of {names[0]} to {names[-1]}" if names[1:] else names[0])
        self.checksums = []
        for flat in () if self.keeps_full_weights else self.flat:
            flat.untyped_storage().resize_(0)

    def to_resting_state(self) -> None:
        """Let each parameter be its piece, with the piece of the reduced gradient."""
        if not self.is_in_step or self.summoned_flat:
            return
        self.is_in_step = False
        kept = self.gradients.shard_views[self.shard_spec.replica]
        for p, piece in self.parameter_shards.items():
            p.grad = None
            p.data = piece
            p.grad = kept[p] if piece.numel() else None

    def require_unwritten(self) -> None:
        """Raise ModelError if a step wrote to a weight or replaced its `data`.

        Each replica keeps a shard only, and would lose what was written to the rest.
        """
        now = [p._version for p, _ in self.full_views]
        for (p, view), before, after in zip(self.full_views, self.versions, now, strict=True):
            if before != after:
                raise _write_error(self.gradients.names[p])
            if self.is_in_step and p.data_ptr() != view.data_ptr():
                raise _write_error(f"the data of {self.gradients.names[p]}")

    def count_references(self) -> None:
        """Count the references to the memory of full weights, before weights are gathered."""
        self.references = StorageReferences(() if self.keeps_full_weights else self.flat)

    def require_released(self) -> None:
        """Raise ModelError if a stage keeps references to full weights, whose memory is freed."""
        for k in self.references.find_increased():
            raise ModelError(
                "a stage keeps a reference to the full weight "
                f"{self.gradients.names[self.buckets[k].parameters[0]]}, or to another weight of "
                "its bucket, and ZeRO level 3 frees full weights after the step",
                hint="keep a copy without its graph: weight.detach().clone(); or zero=2",
            )

    def summon_full(self, collective: StartCollective) -> None:
        """Let parameters be whole until they are taken; in memory of their own, of which somebody
        may keep hold, as `numpy()` does."""
        self._require_shards()
        self.summoned_flat = [
            own.new_zeros(bucket.numel)
            for bucket, own in zip(self.buckets, self.shards, strict=True)
        ]
        for flat, own in zip(self.summoned_flat, self.shards, strict=True):
            if self.shard_spec.replicas > 1 and flat.numel():
                collective("all_gather", "params", flat, own).wait()
            else:
                flat.copy_(own)
        for bucket, flat in zip(self.buckets, self.summoned_flat, strict=True):
            for p, view in zip(bucket.parameters, bucket.views(flat), strict=True):
                p.grad = None
                p.data = view

    @torch.no_grad()
    def write_back(self) -> None:
        """Keep the own part of what parameters are now."""
        shown, self.summoned_flat, self.is_in_step = self.summoned_flat, [], True
        try:
            for p, view in self.full_views:
                if p.shape != view.shape or p.dtype != view.dtype or p.device != view.device:
                    raise ModelError(
                        f"{self.gradients.names[p]} was {list(view.shape)} of {view.dtype} on "
                        f"{view.device}, and is {list(p.shape)} of {p.dtype} on {p.device}",
                        hint="make the executor after the last such change",
                    )
            for bucket, flat, own in zip(self.buckets, shown, self.shards, strict=True):
                for p, view in zip(bucket.parameters, bucket.views(flat), strict=True):
                    if p.data_ptr() != view.data_ptr():
                        view.copy_(p)
                if bucket.parameters[0] not in self.aliases:  # whose part is another stage's
                    own.copy_(bucket.get_shard(flat, self.shard_spec.replica))
        finally:
            self.to_resting_state()


def _warn_of_shards(module: nn.Module, *_: object) -> None:
    """Warn whoever takes the state of a module between steps, as to save it."""
    for name, p in module.named_parameters(recurse=False):
        owner = find_owner(p)
        if owner is not None and not owner.summoned_flat and not owner.is_in_step:
            warnings.warn(
                f"a state_dict has the piece of {name} that this replica keeps (zero "
                f"{owner.shard_spec.zero}), and nobody else's; within `with executor.whole():` "
                "it has "
                "whole weights",
                stacklevel=2,
            )
            return


def _write_error(subject: str) -> ModelError:
    return ModelError(
        f"a forward or a backward writes to {subject}, of which each replica keeps its own part",
        hint="let it be a buffer, or zero=0",
    )


def find_owner(p: nn.Parameter) -> ShardedParameters | None:
    """Whose piece a parameter is, or whose whole weight that is shown; None of any other."""
    owner = vars(p).get(_OWNER_ATTRIBUTE)
    return owner if isinstance(owner, ShardedParameters) and p in owner.parameter_shards else None


def shard_optimizer_state(
    optimizer: Any, shard_ranges: Mapping[nn.Parameter, tuple[torch.Size, int, int]]
) -> None:
    """Let an optimizer that has been made of whole parameters step pieces: of what it keeps for
    each, and of a MainOptimizer's copies, leave the numbers from and to."""
    for one in find_optimizers(optimizer):
        main = {}
        if isinstance(one, MainOptimizer):
            main = {m: p for p, m in zip(one.parameters, one.main_parameters, strict=True)}
        for m, p in main.items():
            if p in shard_ranges:
                m.grad, m.data = None, _take_shard(m.data, *shard_ranges[p])
        state = getattr(unwrap_optimizer(one), "state", {})
        for p in [*state]:
            if (of := shard_ranges.get(main.get(p, p))) is None:
                continue
            for name, value in [*state[p].items()]:
                state[p][name] = tree_map_only(Tensor, partial(_shard_like, of), value)


def _shard_like(shard_range: tuple[torch.Size, int, int], value: Tensor) -> Tensor:
    """Cut what an optimizer keeps for each number of a weight as the weight is cut."""
    return _take_shard(value, *shard_range) if value.shape == shard_range[0] else value


def require_sharded_state(optimizer: Any, shapes: Mapping[Any, torch.Size]) -> None:
    """Raise ModelError if an optimizer keeps tensors of another shape for a piece of a weight, such
    as the shape of the weight: torch's fused ones would take the first numbers."""
    for one in find_optimizers(optimizer):
        main: dict[Any, Any] = {}
        if isinstance(one, MainOptimizer):
            main = dict(zip(one.main_parameters, one.parameters, strict=True))
        inner = unwrap_optimizer(one)
        for p, kept in getattr(inner, "state", {}).items():
            shape = shapes.get(main.get(p, p))
            if shape is None:
                continue
            for name, value in list_state_tensors(kept):
                if value.shape != p.shape:
                    raise ModelError(
                        f"{type(inner).__name__} keeps {name} of {list(value.shape)} for a piece "
                        f"of {list(p.shape)} of a weight",
                        hint="load what a replica has saved itself, or load whole state before the "
                        "executor is made",
                    )


@contextmanager
def guard_shard_step(optimizer: object, zero: int) -> Iterator[None]:
    """Within this an optimizer steps, on pieces of weights if `zero` is not 0.

    Raises ModelError if the optimizer's step has hooks, because they would see pieces, too.  Raises
    ModelError if the step fails on pieces and the optimizer is not torch's.
    """
    for one in map(unwrap_optimizer, find_optimizers(optimizer) if zero else ()):
        if has_step_hooks(one) and not getattr(one, "elementwise", False):
            raise ModelError(
                f"{type(one).__name__} has hooks on its step, and they would see the pieces of "
                f"weights and gradients that a replica keeps (zero {zero})",
                hint="zero=0; or optimizer.elementwise = True, if the hooks are elementwise",
            )
    try:
        yield
    except RuntimeError as error:
        inner = unwrap_optimizer(optimizer)
        if not zero or is_torch_optimizer(inner):
            raise
        raise ModelError(
            f"{type(inner).__name__} fails to step the pieces of weights that a replica keeps, "
            f"which are 1-dim (zero {zero}): {describe_exception(error)}",
            hint="let its tensors have the shape that p has in `step`; or zero=0",
        ) from error


def list_state_tensors(state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of several numbers that an optimizer keeps for a parameter, by name."""
    for name, value in state.items():
        for one in tree_leaves(value):
            if isinstance(one, Tensor) and one.numel() > 1:
                yield name, one


def _take_shard(full: Tensor, shape: torch.Size, low: int, high: int) -> Tensor:
    assert full.shape == shape
    return full.detach().reshape(-1)[low:high].clone()
