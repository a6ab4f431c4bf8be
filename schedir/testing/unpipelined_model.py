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

Batch = Any  # a tensor, or a tuple or dict of tensors; or a list of microbatches
LossFunction = Callable[..., Tensor] | None


class ExpectedGradient(NamedTuple):
    """The expected gradient of a parameter.

    Args:
        value: The gradient.
        size: The sum, over all microbatches, of the norm of the microbatch's gradient. This sum is
            divided by the same number as the gradient. Rounding errors are proportional to this
            size.
    """

    value: Tensor
    size: float


@dataclass(frozen=True)
class UnpipelinedModel:
    """A model that runs without a pipeline, microbatch by microbatch.

    Args:
        model: The model.
        microbatches: The microbatches.
        loss_fn: A function that returns the loss of a microbatch.  If None, the model returns the
            loss.
        divisor: The number by which the sum of the losses is divided.
    """

    model: nn.Module
    microbatches: Sequence[Batch]
    loss_fn: LossFunction
    divisor: float

    @cached_property
    def expected_gradients(self) -> dict[str, ExpectedGradient]:
        """The expected gradients by name, for all parameters on which the loss depends.

        A tied parameter has an entry for each of its names.

        Raises:
            UsageError: The model draws random numbers, or a gradient is not finite.
        """
        expected: dict[str, ExpectedGradient] = {}
        for gradients in self._generate_gradients():
            for name, gradient in gradients.items():
                size = float(flatten_to_float64(gradient).norm()) / self.divisor
                previous = expected.get(name)
                expected[name] = (
                    ExpectedGradient(gradient, size)
                    if previous is None
                    else ExpectedGradient(previous.value + gradient, previous.size + size)
                )
        expected = {
            name: ExpectedGradient(value / self.divisor, size)
            for name, (value, size) in expected.items()
        }
        for name, (value, _) in expected.items():
            if not value.isfinite().all():
                raise UsageError(
                    f"the gradient of {name} is not finite in a plain loop without a pipeline"
                )
        return expected

    def _generate_gradients(self) -> Iterator[dict[str, Tensor]]:
        """Yield the gradients of each microbatch's loss, and restore all buffers at the end."""
        parameter_names = find_parameter_names(self.model)
        saved_buffers = [
            (module, name, buffer, None if buffer is None else buffer.detach().clone())
            for module in self.model.modules()
            for name, buffer in module._buffers.items()
        ]
        for number, batch in enumerate(self.microbatches):
            for p in parameter_names:
                p.grad = None
            state = torch.get_rng_state()
            loss = compute_loss(self.model, batch, self.loss_fn)
            if number == 0 and not torch.equal(state, torch.get_rng_state()):
                raise UsageError(
                    "model uses random numbers, as dropout does, but a pipeline draws other random "
                    "numbers than the plain loop",
                    hint="call model.eval() for this test, or set dropout to 0",
                )
            if loss.requires_grad:
                loss.backward()
            yield {
                n: to_dense(p.grad)
                for p, names in parameter_names.items()
                if p.grad is not None
                for n in names
            }
        for p in parameter_names:
            p.grad = None
        for module, name, buffer, value in saved_buffers:  # a forward may have replaced buffers
            module._buffers[name] = buffer
            if buffer is not None and value is not None:
                buffer.data.copy_(value)


def to_dense(gradient: Tensor) -> Tensor:
    """Return a dense tensor with the values of a gradient.

    Args:
        gradient: A dense or sparse gradient.
    """
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def flatten_to_float64(value: Tensor) -> Tensor:
    """Return all numbers of a tensor as a 1-D float64 tensor.

    Args:
        value: The tensor.  A complex number counts as two numbers.
    """
    value = value.detach()
    return (torch.view_as_real(value) if value.is_complex() else value).flatten().double()


def find_parameter_names(model: nn.Module) -> dict[nn.Parameter, tuple[str, ...]]:
    """Return the names of each parameter of a model.

    Args:
        model: The model.

    Returns:
        The names by parameter.  A tied parameter has several names.
    """
    names: dict[nn.Parameter, tuple[str, ...]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names[p] = (*names.get(p, ()), name)
    return names


def compute_loss(model: nn.Module, batch: Batch, loss_fn: LossFunction) -> Tensor:
    """Return the loss of a microbatch.

    Args:
        model: The model.
        batch: The inputs, or a pair of inputs and targets if there is a `loss_fn`.  Inputs that are
            a tuple or a dict are passed as the arguments of the model.
        loss_fn: A function of the output of the model and the targets.  If None, the loss is the
            output, or its attribute `loss`.

    Returns:
        The loss, of shape ().

    Raises:
        UsageError: The loss is not one number.
    """
    inputs, targets = batch if loss_fn else (batch, None)
    if isinstance(inputs, Mapping):
        output = model(**inputs)
    elif isinstance(inputs, tuple):
        output = model(*inputs)
    else:
        output = model(inputs)
    loss = loss_fn(output, targets) if loss_fn else getattr(output, "loss", output)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        source = "the loss of loss_fn" if loss_fn else "without loss_fn, the output of the model"
        raise UsageError(f"{source} must be one number, not {describe(loss)}", fields=["loss_fn"])
    return loss.reshape(())


def split_batch(batch: Batch, microbatches: int | None, loss_fn: LossFunction) -> list[Batch]:
    """Return the microbatches of a batch.

    Args:
        batch: Tensors, or tuples and dicts of tensors.  Each tensor is split along its first
            dimension.  A list counts as a list of microbatches.
        microbatches: The number of microbatches.  It may be None if `batch` is a list.
        loss_fn: If it is not None, each microbatch must be a pair of inputs and targets.

    Returns:
        One batch per microbatch.

    Raises:
        UsageError: The batch cannot be split, is too short, is empty, or has no pairs although
            there is a `loss_fn`.
    """
    pair = "with a loss_fn, a batch must be a pair (inputs, targets)"
    if isinstance(batch, list):
        result = batch
        if microbatches not in (None, len(batch)):
            raise UsageError(
                f"microbatches is {microbatches}, but batch is a list of {len(batch)} microbatches",
                fields=["microbatches"],
            )
    else:
        if not isinstance(microbatches, int) or microbatches < 1:
            raise UsageError(
                f"microbatches must be an integer, 1 or more, not {describe(microbatches)}",
                fields=["microbatches"],
                hint="microbatches can be left out only if batch is a list of microbatches",
            )
        leaves, shape = tree_flatten(batch)
        split_leaves = [_split_leaf(leaf, microbatches) for leaf in leaves]
        result = [
            tree_unflatten([parts[k] for parts in split_leaves], shape) for k in range(microbatches)
        ]
    if not result:
        raise UsageError("batch is empty: it must have at least one microbatch", fields=["batch"])
    for microbatch in result:
        if loss_fn and not (isinstance(microbatch, tuple) and len(microbatch) == 2):
            raise UsageError(f"{pair}, not {describe(microbatch)}", fields=["batch"])
    return result


def _split_leaf(leaf: Any, microbatches: int) -> Sequence[Any]:
    if isinstance(leaf, MutableMapping):  # such as a BatchEncoding of transformers
        copies = [copy(leaf) for _ in range(microbatches)]
        for key, value in leaf.items():
            for target, part in zip(copies, _split_leaf(value, microbatches), strict=True):
                target[key] = part
        return copies
    if not isinstance(leaf, Tensor):
        attributes: Any = getattr(leaf, "__dict__", {})
        has_tensor = any(isinstance(value, Tensor) for value in attributes.values())
        if has_tensor or hasattr(leaf, "__array__"):
            raise UsageError(
                f"a {type(leaf).__name__} in batch cannot be divided into microbatches",
                fields=["batch"],
                hint="use tensors, tuples and dicts of tensors, or a list of microbatches",
            )
        return [leaf] * microbatches
    # Detach the tensor, so that backwards do not add to the gradient of the caller's tensor.
    tensor = leaf.detach().requires_grad_(leaf.requires_grad)
    if tensor.dim() == 0:
        return [tensor] * microbatches
    if tensor.shape[0] < microbatches:
        raise UsageError(
            f"a tensor of shape {[*tensor.shape]} cannot be divided into {microbatches} "
            "microbatches",
            fields=["batch", "microbatches"],
        )
    return tensor.tensor_split(microbatches)


def copy_model(model: nn.Module) -> nn.Module:
    """Return a copy of a model without gradients, with the tensor hooks of its parameters.

    Args:
        model: The model.

    Raises:
        UsageError: The model cannot be copied, or a parameter has a post-accumulate hook.  Such a
            hook would get the gradient of one microbatch instead of the sum over all microbatches.
    """
    for name, p in model.named_parameters():
        if p._post_accumulate_grad_hooks:
            raise UsageError(
                f"{name} has a post-accumulate-grad hook, which needs the sum of gradients, but "
                "the plain loop without a pipeline computes only the gradient of each microbatch",
                hint="remove the hook for this test, or use register_hook",
            )
    try:
        result = deepcopy(model)
    except Exception as error:  # `__deepcopy__` of a module may raise any exception
        raise UsageError(
            f"model cannot be copied: {describe_exception(error)}",
            hint="if it has weight_norm, use torch.nn.utils.parametrizations.weight_norm",
        ) from None
    result.zero_grad(set_to_none=True)
    for p, new_p in zip(model.parameters(), result.parameters(), strict=True):
        for hook in (p._backward_hooks or {}).values() if p.requires_grad else ():
            new_p.register_hook(hook)
    return result
