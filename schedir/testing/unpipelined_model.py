"""Compute the gradients of a model without a pipeline, microbatch by microbatch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from schedir.errors import UsageError, describe, describe_exception

Batch = Any  # a tensor, or a tuple or dict of such; a list of microbatches if it is already cut
LossFunction = Callable[..., Tensor] | None


class ExpectedGradient(NamedTuple):
    """The expected gradient of a parameter.

    Args:
        value: The gradient.
        size: The sum of the norms of its microbatches' gradients, to which rounding errors are
            proportional.
    """

    value: Tensor
    size: float


@dataclass(frozen=True)
class UnpipelinedModel:
    """A model, its microbatches, and the number by which the sum of their losses is divided."""

    model: nn.Module
    microbatches: Sequence[Batch]
    loss_fn: LossFunction
    divisor: float

    @cached_property
    def expected_gradients(self) -> dict[str, ExpectedGradient]:
        """The gradients of all parameters on which the loss depends, by each of their names.

        Raises:
            UsageError: The model draws random numbers, or a gradient is not finite.
        """
        due: dict[str, ExpectedGradient] = {}
        for part in self._generate_gradients():
            for name, one in part.items():
                size = float(flatten_to_float64(one).norm()) / self.divisor
                before = due.get(name)
                due[name] = (
                    ExpectedGradient(one, size)
                    if before is None
                    else ExpectedGradient(before.value + one, before.size + size)
                )
        due = {
            name: ExpectedGradient(value / self.divisor, size)
            for name, (value, size) in due.items()
        }
        for name, (value, _) in due.items():
            if not value.isfinite().all():
                raise UsageError(f"the plain loop's own gradient of {name} is not finite")
        return due

    def _generate_gradients(self) -> Iterator[dict[str, Tensor]]:
        """Yield the gradients of each microbatch's loss, and restore all buffers at the end."""
        places = find_parameter_names(self.model)
        before = [
            (module, name, buffer, None if buffer is None else buffer.detach().clone())
            for module in self.model.modules()
            for name, buffer in module._buffers.items()
        ]
        for number, batch in enumerate(self.microbatches):
            for p in places:
                p.grad = None
            state = torch.get_rng_state()
            loss = compute_loss(self.model, batch, self.loss_fn)
            if number == 0 and not torch.equal(state, torch.get_rng_state()):
                raise UsageError(
                    "the model draws random numbers, as dropout does, and a pipeline draws others",
                    hint="model.eval(), or dropout of 0, for this test",
                )
            if loss.requires_grad:
                loss.backward()
            yield {
                n: to_dense(p.grad) for p, own in places.items() if p.grad is not None for n in own
            }
        for p in places:
            p.grad = None
        for module, name, buffer, value in before:  # a forward may have replaced buffers
            module._buffers[name] = buffer
            if buffer is not None and value is not None:
                buffer.data.copy_(value)


def to_dense(gradient: Tensor) -> Tensor:
    """Return a gradient, which may be sparse, as a dense tensor."""
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def flatten_to_float64(value: Tensor) -> Tensor:
    """Return all numbers of a tensor as float64; a complex number counts as two."""
    value = value.detach()
    return (torch.view_as_real(value) if value.is_complex() else value).flatten().double()


def find_parameter_names(model: nn.Module) -> dict[nn.Parameter, tuple[str, ...]]:
    """Return the names of each parameter; a tied one has several."""
    names: dict[nn.Parameter, tuple[str, ...]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names[p] = (*names.get(p, ()), name)
    return names


def compute_loss(model: nn.Module, batch: Batch, loss_fn: LossFunction) -> Tensor:
    """Return the loss of a microbatch: `loss_fn(model(inputs), targets)`, or the model's output."""
    inputs, targets = batch if loss_fn else (batch, None)
    if isinstance(inputs, Mapping):
        output = model(**inputs)
    elif isinstance(inputs, tuple):
        output = model(*inputs)
    else:
        output = model(inputs)
    loss = loss_fn(output, targets) if loss_fn else getattr(output, "loss", output)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        gave = "loss_fn gives" if loss_fn else "without a loss_fn the model's output is the loss:"
        raise UsageError(f"a loss is one number, and {gave} {describe(loss)}", fields=["loss_fn"])
    return loss.reshape(())


def split_batch(batch: Batch, microbatches: int | None, loss_fn: LossFunction) -> list[Batch]:
    """Return the microbatches of a batch: each tensor is cut along its first dimension.

    Raises:
        UsageError: The batch cannot be cut, is too short, or is not a pair although there is a
            `loss_fn`.
    """
    pair = "with a loss_fn a batch is a pair, (inputs, targets)"
    if isinstance(batch, list):
        several = batch
        if microbatches not in (None, len(batch)):
            raise UsageError(
                f"the batch is cut into {len(batch)} microbatches, not {microbatches}",
                fields=["microbatches"],
            )
    else:
        if not isinstance(microbatches, int) or microbatches < 1:
            raise UsageError(
                f"a batch is cut into a number of microbatches, not {describe(microbatches)}",
                fields=["microbatches"],
                hint="a list is a batch that is already cut",
            )
        leaves, shape = tree_flatten(batch)
        pieces = [_split_leaf(leaf, microbatches) for leaf in leaves]
        several = [tree_unflatten([own[k] for own in pieces], shape) for k in range(microbatches)]
    if not several:
        raise UsageError("a batch of no microbatches has no gradients", fields=["batch"])
    for one in several:
        if loss_fn and not (isinstance(one, tuple) and len(one) == 2):
            raise UsageError(f"{pair}, not {describe(one)}", fields=["batch"])
    return several


def _split_leaf(leaf: Any, microbatches: int) -> Sequence[Any]:
    if isinstance(leaf, MutableMapping):  # as the BatchEncoding of transformers
        pieces = [copy(leaf) for _ in range(microbatches)]
        for key, value in leaf.items():
            for piece, part in zip(pieces, _split_leaf(value, microbatches), strict=True):
                piece[key] = part
        return pieces
    if not isinstance(leaf, Tensor):
        parts: Any = getattr(leaf, "__dict__", {})
        if any(isinstance(one, Tensor) for one in parts.values()) or hasattr(leaf, "__array__"):
            raise UsageError(
                f"a batch of {type(leaf).__name__} cannot be cut into microbatches",
                fields=["batch"],
                hint="tensors, or tuples and dicts of them; or a list of microbatches",
            )
        return [leaf] * microbatches
    # A detached leaf, so that backwards do not add to the gradient of the caller's tensor.
    own = leaf.detach().requires_grad_(leaf.requires_grad)
    if own.dim() == 0:
        return [own] * microbatches
    if own.shape[0] < microbatches:
        raise UsageError(
            f"a tensor of shape {list(own.shape)} cannot be cut into {microbatches} microbatches",
            fields=["batch", "microbatches"],
        )
    return own.tensor_split(microbatches)


def copy_model(model: nn.Module) -> nn.Module:
    """Return a copy of a model without gradients, but with the tensor hooks of its parameters.

    Raises:
        UsageError: The model cannot be copied, or has a post-accumulate hook, which would see the
            gradient of one microbatch instead of their sum.
    """
    for name, p in model.named_parameters():
        if p._post_accumulate_grad_hooks:
            raise UsageError(
                f"{name} has a post-accumulate hook, and the plain loop adds up no gradients in "
                "place: it takes those of each microbatch",
                hint="remove the hook for this test, or use register_hook",
            )
    try:
        own = deepcopy(model)
    except Exception as error:  # `__deepcopy__` of a module may raise any exception
        raise UsageError(
            "the plain loop needs a copy of the model, and that fails: "
            f"{describe_exception(error)}",
            hint="parametrizations.weight_norm can be copied, and the older weight_norm cannot",
        ) from None
    own.zero_grad(set_to_none=True)
    for p, copied in zip(model.parameters(), own.parameters(), strict=True):
        for hook in (p._backward_hooks or {}).values() if p.requires_grad else ():
            copied.register_hook(hook)
    return own
