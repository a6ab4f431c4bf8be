"""Register layers whose backward can be split into I (BackwardInput) and W (BackwardWeight).

A layer becomes splittable when its `__class__` is replaced by a subclass of its type. The subclass
has a forward whose backward can be split. Parameters, names and hooks stay the same, and results
have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import partial, partialmethod
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from schedir.errors import ModelError, UsageError, require_type
from schedir.runtime.autograd.node_hook_detection import (
    can_defer_gradient,
    leaf_has_hooks,
    register_observer,
)
from schedir.runtime.autograd.split_backward import (
    DeferredGradients,
    LayerRule,
    SplitLayer,
    defer_weight_gradients,
    embedding,
    linear,
    matmul,
    run_split_layer,
)

LayerForward = Callable[[Any, Tensor], Tensor]
_MAX_NAMED_LAYERS = 6  # the most layers that a warning lists


def make_backward_splittable(module: nn.Module, *layer_types: type[nn.Module]) -> nn.Module:
    """Make linear layers and layers of registered types in a module splittable, in place.

    The types are `nn.Linear`, `nn.Embedding`, `Conv1D` of Hugging Face's transformers, and types
    that `register_splittable_layer` has registered. `fully_shard` may have wrapped the layers. The
    function does not change:

    - layers of other subclasses of these types,
    - layers with a replaced `forward`,
    - embeddings with `max_norm`, `sparse` or `scale_grad_by_freq`.

    In three cases the instruction I computes the gradient of a weight, instead of W:

    - another module uses the weight directly, such as `nn.MultiheadAttention`,
    - the weight is computed from other parameters, as after pruning,
    - the weight has hooks.

    `torch.compile` may prevent every split. The executor then raises an error.

    Args:
        module: A stage, or another module.
        *layer_types: Types that are split only on request. The only such type is `nn.LayerNorm`.
            The weight gradients of a LayerNorm take a thousandth of the time that the matrix
            products of a transformer layer take. If W computed them, the input and the output
            gradient of each LayerNorm would have to be kept for W. These tensors would increase the
            memory of deferred gradients by a quarter.

    Returns:
        The module.

    Raises:
        UsageError: No gradient rules are registered for a type of `layer_types`.
        ModelError: A layer has a parameter for which its type has no gradient rule.

    Example:
        >>> from copy import deepcopy
        >>> import schedir, torch
        >>> from torch import nn
        >>> from schedir.runtime import InProcessExecutor, run_sequential, make_backward_splittable
        >>> program = schedir.compile(schedir.schedules.zb_h1,
        ...     schedir.PipelineShape(ranks=2, microbatches=4))
        >>> plain = [nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2)]
        >>> stages = [make_backward_splittable(deepcopy(stage)) for stage in plain]
        >>> x, loss = torch.ones(4, 2, 8), nn.functional.mse_loss
        >>> total = InProcessExecutor(program, stages, loss=loss, boundary=(2, 8)).step(x, x)
        >>> bool(total == run_sequential(plain, x, x, loss=loss))
        True
        >>> torch.equal(stages[0][0].weight.grad, plain[0][0].weight.grad)  # computed by W
        True
    """
    require_type(module, "module", nn.Module, "make_backward_splittable(stages[0])")
    for index, kind in enumerate(layer_types):
        require_type(kind, f"layer_types[{index}]", type, "nn.LayerNorm")
        if _find_split_type(kind) is None:
            raise _unknown_type_error(kind)
    for layer in module.modules():
        # A layer that is already splittable gets the rules that are registered now.
        original_type = _original_type(layer)
        kind = _without_fsdp(original_type)
        was_split = original_type is not type(layer)
        is_selected = kind not in _OPT_IN_TYPES or kind in layer_types or was_split
        if not is_selected or "forward" in vars(layer):
            continue
        split = _find_split_type(original_type)
        if split is None or (kind is nn.Embedding and _has_special_gradient(layer)):
            continue
        if kind in _REGISTERED_LAYERS and (
            names := _find_uncovered_parameters(layer, _REGISTERED_LAYERS[kind])
        ):
            if _has_computed_weight(layer, _REGISTERED_LAYERS[kind]):
                continue
            raise ModelError(
                f"the split backward of {kind.__name__} has no rule for its parameter {names[0]}",
                hint="add it to deferred_grads or immediate_grads of "
                f"register_splittable_layer({kind.__name__}, ...)",
            )
        layer.__class__ = split
    return module


def _original_type(layer: nn.Module) -> type[nn.Module]:
    """Return the type that a layer had before it became splittable."""
    kind: type[nn.Module] = type(layer).__dict__.get("original_type", type(layer))
    return kind


def _without_fsdp(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the type that a layer had before `fully_shard` replaced it by a subclass."""
    _, *bases = kind.__mro__
    return bases[1] if bases[0].__name__ == "FSDPModule" else kind


def _find_uncovered_parameters(layer: nn.Module, split: SplitLayer) -> list[str]:
    """Return the names of the parameters of a layer for which a split has no rule."""
    names = (name for name, _ in layer.named_parameters(remove_duplicate=False))
    return [
        name
        for name in names
        if name not in split.deferred_grads and name not in split.immediate_grads
    ]


def _has_computed_weight(layer: nn.Module, split: SplitLayer) -> bool:
    """Return whether a weight with a rule is computed from other parameters, as after pruning."""
    parameters = dict(layer.named_parameters(remove_duplicate=False))
    return any(
        isinstance(getattr(layer, name, None), Tensor)
        for name in {*split.deferred_grads, *split.immediate_grads}.difference(
            parameters, layer._buffers
        )
    )


def register_splittable_layer(
    layer_type: type[nn.Module],
    *,
    input_grad: LayerRule,
    deferred_grads: Mapping[str, LayerRule],
    immediate_grads: Mapping[str, LayerRule] | None = None,
    forward: Callable[[Any, Tensor], tuple[Tensor, ...]] | None = None,
) -> None:
    """Register gradient rules for a layer type that takes one tensor and returns one tensor.

    The rules are called as `rule(layer, x, dy)`, with the input `x` of the layer and the gradient
    `dy` of its output. With a `forward` that returns (y, a, b, ...) the rules are called as
    `rule(layer, a, b, ..., dy)`. Each rule returns the gradient for the full microbatch, in the
    shape of the parameter or, for `input_grad`, of `x`.

    `check_splittable_layer` compares the rules with autograd. A layer runs unsplit under autocast,
    or if it is called with more than one argument.

    Args:
        layer_type: A subclass of nn.Module. Layers of its subclasses are not split.
        input_grad: The rule for the gradient of the input.
        deferred_grads: Parameter name -> rule, for the parameters whose gradients W computes. The
            saved tensors and dy are kept until W has run.
        immediate_grads: Parameter name -> rule, for the other parameters. The instruction I
            computes their gradients.
        forward: A function of (layer, x) that returns the output and the tensors that the rules
            need. By default it is the layer's forward, and x is saved.

    Raises:
        UsageError: `layer_type` is no subclass of nn.Module.

    Example:
        >>> import torch
        >>> from schedir.runtime import check_splittable_layer, register_splittable_layer
        >>> class Scale(torch.nn.Module):
        ...     def __init__(self, n):
        ...         super().__init__()
        ...         self.weight = torch.nn.Parameter(torch.ones(n))
        ...     def forward(self, x):
        ...         return x * self.weight
        >>> register_splittable_layer(
        ...     Scale,
        ...     input_grad=lambda layer, x, dy: dy * layer.weight,
        ...     deferred_grads={"weight": lambda layer, x, dy: (x * dy).flatten(0, -2).sum(0)},
        ... )
        >>> check_splittable_layer(Scale(8), torch.randn(4, 8))
    """
    if not (isinstance(layer_type, type) and issubclass(layer_type, nn.Module)):
        raise UsageError(
            f"layer_type must be a subclass of nn.Module, not {layer_type!r:.60}",
            hint="register_splittable_layer(nn.Conv2d, ...)",
        )
    split = SplitLayer(
        forward or partial(_forward_saving_input, layer_type),
        input_grad,
        dict(deferred_grads),
        dict(immediate_grads or {}),
    )
    _REGISTERED_LAYERS[layer_type] = split

    def run(layer: nn.Module, *args: Any, **keywords: Any) -> Tensor:
        x, *other_args = *args, *keywords.values()
        runs_unsplit = (
            other_args
            or torch.is_autocast_enabled(x.device.type)
            or _find_uncovered_parameters(layer, split)
        )
        if not torch.compiler.is_compiling():
            (_UNSPLIT_LAYERS.add if runs_unsplit else _UNSPLIT_LAYERS.discard)(layer)
        if runs_unsplit:
            y: Tensor = layer_type.forward(layer, *args, **keywords)
            return y
        return run_split_layer(split, layer, x)

    _SPLIT_TYPES[layer_type] = _make_split_type(layer_type, run)


def check_splittable_layer(layer: nn.Module, x: Tensor) -> None:
    """Check that a layer has the same output and gradients with a split and a full backward.

    The function runs a split and an unsplit copy of the layer, with the same random numbers.

    Args:
        layer: A layer of a type that can be split.
        x: Its input.

    Raises:
        UsageError: The type of the layer cannot be split.
        ModelError: The output or a gradient differs by more than 0.01 % of its norm, or by more
            than 1 % if its dtype has 16 bits. The error names the tensor that differs.

    Example:
        >>> import torch
        >>> from schedir.runtime import check_splittable_layer
        >>> check_splittable_layer(torch.nn.Linear(8, 8), torch.randn(4, 8))
    """
    require_type(layer, "layer", nn.Module, "nn.Linear(8, 8)")
    require_type(x, "x", Tensor, "torch.randn(2, 8)")
    kind = _original_type(layer)
    unsplit = deepcopy(layer)
    split = make_backward_splittable(deepcopy(layer), *_OPT_IN_TYPES & {kind})
    unsplit.__class__ = kind
    if not hasattr(split, "deferred_names"):
        raise _unknown_type_error(kind)
    results: list[dict[str, Tensor | None]] = []
    for tested_layer in (unsplit, split):
        layer_input = x.detach().clone()
        layer_input.requires_grad_(layer_input.is_floating_point())
        for p in tested_layer.parameters():
            p.grad = None
        with torch.random.fork_rng():
            y = tested_layer(layer_input)
        with defer_weight_gradients(DeferredGradients()) as tape:
            generator = torch.Generator(y.device).manual_seed(0)
            dy = torch.randn(y.shape, generator=generator, dtype=y.dtype, device=y.device)
            torch.autograd.backward(y, dy)
        tape.run()
        results.append({"the output": y.detach(), "the gradient of the input": layer_input.grad})
        for name, p in tested_layer.named_parameters():
            results[-1][f"the gradient of {name}"] = p.grad
    for name, expected in results[0].items():
        actual = results[1][name]
        if expected is None and actual is None:
            continue
        max_error = 1e-2 if expected is not None and expected.dtype.itemsize < 4 else 1e-4
        if expected is None or actual is None or not _relative_error(actual, expected) <= max_error:
            raise ModelError(
                f"the split layer and the unsplit layer {kind.__name__} differ in {name}"
            )


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    if actual.shape != expected.shape:
        return float("inf")
    return float((actual - expected).double().norm() / expected.double().norm().clamp(min=1e-30))


# ------------------------------------------------------------ types


class SplitLinear(nn.Linear):
    """An `nn.Linear` whose weight gradient can be deferred."""

    deferred_names, original_type = ("weight",), nn.Linear

    def forward(self, input: Tensor) -> Tensor:
        """See `nn.Linear.forward`."""
        return linear(input, self.weight, self.bias)


class SplitEmbedding(nn.Embedding):
    """An `nn.Embedding` whose gradient can be deferred."""

    deferred_names, original_type = ("weight",), nn.Embedding

    def forward(self, input: Tensor) -> Tensor:
        """See `nn.Embedding.forward`."""
        if _has_special_gradient(self):
            return nn.Embedding.forward(self, input)
        return embedding(input, self.weight, self.padding_idx)


def _run_conv1d(layer: Any, x: Tensor) -> Tensor:
    return matmul(x, layer.weight, layer.bias)


_SPLIT_TYPES: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: SplitLinear,
    nn.Embedding: SplitEmbedding,
}
_REGISTERED_LAYERS: dict[type[nn.Module], SplitLayer] = {}
_OPT_IN_TYPES: set[type[nn.Module]] = {nn.LayerNorm}
_UNSPLIT_LAYERS: WeakSet[nn.Module] = WeakSet()  # registered layers whose last run was unsplit

# Type name -> forward. The keys are names, because the library of a type may not be installed.
_FORWARDS_BY_TYPE_NAME: dict[str, LayerForward] = {"transformers.pytorch_utils.Conv1D": _run_conv1d}


def _find_split_type(kind: type[nn.Module]) -> type[nn.Module] | None:
    """Return the splittable subclass of a layer type, or None if there is none."""
    if kind not in _SPLIT_TYPES:
        base_type = _without_fsdp(kind)
        run = _FORWARDS_BY_TYPE_NAME.get(f"{kind.__module__}.{kind.__qualname__}")
        if base_type is not kind and (split := _find_split_type(base_type)):
            run = split.forward
        if run is not None:
            _SPLIT_TYPES[kind] = _make_split_type(kind, run)
    return _SPLIT_TYPES.get(kind)


def _make_split_type(kind: type[nn.Module], forward: LayerForward) -> type[nn.Module]:
    """Create a subclass of `kind` with this forward. Pickles of its layers refer to `kind`."""
    members = {
        "forward": forward,
        "__reduce_ex__": partialmethod(_reduce_split_layer, kind),
        "deferred_names": (*_REGISTERED_LAYERS[base_type].deferred_grads,)
        if (base_type := _without_fsdp(kind)) in _REGISTERED_LAYERS
        else ("weight",),
        "original_type": kind,
    }
    return type(f"Split{kind.__name__}", (kind,), members)


def _reduce_split_layer(layer: nn.Module, kind: type[nn.Module], protocol: int) -> tuple[Any, ...]:
    state = kind.__reduce_ex__(layer, protocol)[2:]
    return _rebuild_split_layer, (kind,), *state


def _rebuild_split_layer(kind: type[nn.Module]) -> nn.Module:
    split = _find_split_type(kind)
    if split is None:
        raise _unknown_type_error(kind)
    return split.__new__(split)


def _unknown_type_error(kind: type[nn.Module]) -> UsageError:
    name = kind.__name__
    return UsageError(
        f"schedir cannot split the backward of layers of type {name}",
        hint=f"register_splittable_layer({name}, ...)",
    )


def _has_special_gradient(layer: Any) -> bool:
    """Return whether an embedding has an option that changes its gradient or its weight."""
    return bool(layer.max_norm or layer.sparse or layer.scale_grad_by_freq)


def _forward_saving_input(
    kind: type[nn.Module], layer: nn.Module, x: Tensor
) -> tuple[Tensor, Tensor]:
    return kind.forward(layer, x), x


def _layer_norm_forward(layer: nn.LayerNorm, x: Tensor) -> tuple[Tensor, ...]:
    shape = list(layer.normalized_shape)
    y, mean, rstd = torch.native_layer_norm(x, shape, layer.weight, layer.bias, layer.eps)
    return y, x, mean, rstd


def _layer_norm_gradient(
    output_index: int, layer: nn.LayerNorm, x: Tensor, mean: Tensor, rstd: Tensor, dy: Tensor
) -> Tensor:
    """Return the gradient of the input (`output_index` 0), the weight (1) or the bias (2)."""
    gradients: tuple[Tensor, ...] = torch.ops.aten.native_layer_norm_backward(
        dy, x, layer.normalized_shape, mean, rstd, layer.weight, layer.bias,
        [output_index == 0, output_index == 1, output_index == 2],
    )  # fmt: skip
    return gradients[output_index]


register_splittable_layer(
    nn.LayerNorm,
    forward=_layer_norm_forward,
    input_grad=partial(_layer_norm_gradient, 0),
    deferred_grads={
        "weight": partial(_layer_norm_gradient, 1),
        "bias": partial(_layer_norm_gradient, 2),
    },
)


# ------------------------------------------------------------ layers that are not split


@contextmanager
def watch_accumulation(module: nn.Module) -> Iterator[set[str]]:
    """Collect the names of parameters whose gradients autograd accumulates in this context.

    Args:
        module: The module whose trained parameters are observed.

    Yields:
        The set of names, which grows during the context.
    """
    accumulated: set[str] = set()

    def on_gradient(name: str, _: object, gradients: tuple[Tensor | None, ...]) -> None:
        if gradients[0] is not None:
            accumulated.add(name)

    # Keep the nodes alive. Otherwise each graph would create a new node for the parameter.
    parameters = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    nodes = {name: get_gradient_edge(p).node for name, p in parameters}
    handles = [register_observer(node, partial(on_gradient, name)) for name, node in nodes.items()]
    try:
        yield accumulated
    finally:
        for handle in handles:
            handle.remove()


def describe_unsplit_layers(module: nn.Module, accumulated: set[str], has_split: bool) -> str:
    """Return the text of a warning about layers whose full backward ran in the instruction I.

    With `has_split`, the text leaves out parameters with cheap gradients. These are vectors, and
    parameters of a module that also has a split matrix, such as position embeddings.

    Args:
        module: The module of a stage.
        accumulated: The names of the parameters for which autograd accumulated gradients in I.
        has_split: True if any weight gradient was deferred, or if the module is a segment of a
            stage, which may have no splittable layer.

    Returns:
        The names and types of the layers, with hints, or an empty text if there are no such layers.
    """
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    matrices = {name for name, p in parameters.items() if sum(n > 1 for n in p.shape) > 1}
    layers: dict[str, type[nn.Module]] = {}
    for name in parameters:
        path, dot, _ = name.rpartition(".")
        has_split_matrix = any(matrix.startswith(path + dot) for matrix in matrices - accumulated)
        if name in accumulated and not (has_split and (has_split_matrix or name not in matrices)):
            layers[path] = type(module.get_submodule(path))
    names = [f"{path or 'itself'} ({kind.__name__})" for path, kind in layers.items()]
    if not names:
        return ""
    names[_MAX_NAMED_LAYERS:] = [f"and {len(names) - _MAX_NAMED_LAYERS} more"] * (
        len(names) > _MAX_NAMED_LAYERS
    )
    unsplit_types = {
        kind for kind in layers.values() if not hasattr(kind, "deferred_names")
    } - _OPT_IN_TYPES
    splittable_types = sorted(kind.__name__ for kind in unsplit_types if _find_split_type(kind))
    hints = [
        f"; schedir.runtime.make_backward_splittable(stage) splits {' and '.join(splittable_types)}"
    ] * bool(splittable_types)
    hints += ["; schedir.runtime.register_splittable_layer adds a type"] * (
        len(splittable_types) < len(unsplit_types)
    )
    return f"{', '.join(names)}: the instruction I runs their full backward{''.join(hints)}"


def find_deferrable_weights(module: nn.Module) -> set[str]:
    """Return the names of weights whose gradients the split layers of a module can defer.

    The result excludes weights with hooks. It also excludes weights of registered layers whose last
    forward was unsplit, for example under autocast.

    Args:
        module: The module of a stage.
    """
    deferred_parameters = {
        layer._parameters.get(name)
        for layer in module.modules()
        for name in getattr(layer, "deferred_names", ())
        if layer not in _UNSPLIT_LAYERS
    }
    return {
        name
        for name, p in module.named_parameters()
        if p in deferred_parameters
        and can_defer_gradient(p)
        and not leaf_has_hooks(p, get_gradient_edge(p).node)
    }
