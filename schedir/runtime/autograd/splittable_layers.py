"""Register layers whose backward can be split into dI and dW.

A layer is split by giving it a class of its own, a subclass of its type whose forward is
splittable (see `has_split`).  Parameters, names, hooks and results stay as they are, bit for bit.
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
_MAX_NAMED_LAYERS = 6  # layers that a warning names


def make_backward_splittable(module: nn.Module, *layer_types: type[nn.Module]) -> nn.Module:
    """Make linear layers within a module splittable, and others whose types are known, in place.

    These are `nn.Linear`, `nn.Embedding`, the `Conv1D` of Hugging Face's transformers, and what
    `register_splittable_layer` has been told.  Returns the module.  Layers of a subclass are left
    alone, and embeddings with a norm, sparse or scaled gradients.  A weight gets its gradient in I
    where it is used otherwise, as by `nn.MultiheadAttention`, or is computed (pruned,
    parametrized), or has hooks.  Under `torch.compile` nothing may be split: the executor then
    refuses.

    `layer_types` are types that are known and split only where asked for.  That is `nn.LayerNorm`:
    its weights' gradients take a thousandth of the time of a transformer layer's products, and to
    leave them for W the tape keeps its input and output gradient, a quarter more.

    Raises UsageError for a type in `layer_types` that is not known, and ModelError for a layer with
    a parameter of which its split does not tell the gradient.

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
    >>> torch.equal(stages[0][0].weight.grad, plain[0][0].weight.grad)  # which W has computed
    True
    """
    require_type(module, nn.Module, "make_backward_splittable(stage), of one stage")
    for kind in layer_types:
        require_type(kind, type, "nn.LayerNorm")
        if _find_split_type(kind) is None:
            raise _unknown_type_error(kind)
    for layer in module.modules():
        kind = _original_type(layer)  # what is split already is split as was taught last
        asked = kind not in _OPT_IN_TYPES or kind in layer_types or kind is not type(layer)
        split = _find_split_type(kind) if asked else None
        if split is None or (kind is nn.Embedding and _has_special_gradient(layer)):
            continue
        if kind in _REGISTERED_LAYERS and (
            names := _find_uncovered_parameters(layer, _REGISTERED_LAYERS[kind])
        ):
            if _has_computed_weight(layer, _REGISTERED_LAYERS[kind]):
                continue
            raise ModelError(f"the split of {kind.__name__} says nothing of its {names[0]}")
        layer.__class__ = split
    return module


def _original_type(layer: nn.Module) -> type[nn.Module]:
    """The type of a layer before it was split, or as it is; of a subclass, that."""
    kind: type[nn.Module] = type(layer).__dict__.get("original_type", type(layer))
    return kind


def _find_uncovered_parameters(layer: nn.Module, split: SplitLayer) -> list[str]:
    """The names of parameters of which its split does not tell the gradient."""
    names = (name for name, _ in layer.named_parameters(remove_duplicate=False))
    return [
        name
        for name in names
        if name not in split.deferred_grads and name not in split.immediate_grads
    ]


def _has_computed_weight(layer: nn.Module, split: SplitLayer) -> bool:
    """Whether a weight that has a rule is computed from others, as where it is pruned."""
    own = dict(layer.named_parameters(remove_duplicate=False))
    return any(
        isinstance(getattr(layer, name, None), Tensor)
        for name in {*split.deferred_grads, *split.immediate_grads}.difference(own, layer._buffers)
    )


def register_splittable_layer(
    layer_type: type[nn.Module],
    *,
    input_grad: LayerRule,
    deferred_grads: Mapping[str, LayerRule],
    immediate_grads: Mapping[str, LayerRule] | None = None,
    forward: Callable[[Any, Tensor], tuple[Tensor, ...]] | None = None,
) -> None:
    """Teach `make_backward_splittable` layers of a type, which take one tensor and give one.

    `input(layer, x, dy)` is the gradient of x, where x is what the layer was given and dy the
    gradient of what it gave.  `deferred_grads` has such a rule for each parameter, by name, whose
    gradient is left for W: until then x and dy are kept.  `immediate_grads` has those of the
    others, computed in I. A rule gives the gradient of a whole microbatch, in the parameter's
    shape.  y is what the layer's own forward gives; a `forward(layer, x)` gives (y, a, b, ...)
    instead, and then rules are called as `rule(layer, a, b, ..., dy)`: what it keeps must hold what
    they need.

    `check_splittable_layer` compares the rules with autograd.  Under autocast a taught layer is not
    split, nor where it is given more than a tensor. Raises UsageError for what is no type of
    module.

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
            f"what is split is a type of nn.Module, not {layer_type!r:.60}",
            hint="register_splittable_layer(nn.Conv2d, ...)",
        )
    how = SplitLayer(
        forward or partial(_forward_saving_input, layer_type),
        input_grad,
        dict(deferred_grads),
        dict(immediate_grads or {}),
    )
    _REGISTERED_LAYERS[layer_type] = how

    def run(layer: nn.Module, *given: Any, **named: Any) -> Tensor:
        x, *more = *given, *named.values()
        whole = (
            more
            or torch.is_autocast_enabled(x.device.type)
            or _find_uncovered_parameters(layer, how)
        )
        if not torch.compiler.is_compiling():
            (_UNSPLIT_LAYERS.add if whole else _UNSPLIT_LAYERS.discard)(layer)
        if whole:
            y: Tensor = layer_type.forward(layer, *given, **named)
            return y
        return run_split_layer(how, layer, x)

    _SPLIT_TYPES[layer_type] = _make_split_type(layer_type, run)


def check_splittable_layer(layer: nn.Module, x: Tensor) -> None:
    """Compare how a layer is split with what autograd gives for the layer as it is.

    Raises ModelError that says which gradient is off: by more than 1 % of its norm in types of 16
    bits, else by more than 0.01 %; UsageError for a layer of a type that is not known.

    >>> import torch
    >>> from schedir.runtime import check_splittable_layer
    >>> check_splittable_layer(torch.nn.Linear(8, 8), torch.randn(4, 8))
    """
    require_type(layer, nn.Module, "nn.Linear(8, 8)")
    require_type(x, Tensor, "torch.randn(2, 8)")
    kind = _original_type(layer)
    whole, split = (
        deepcopy(layer),
        make_backward_splittable(deepcopy(layer), *_OPT_IN_TYPES & {kind}),
    )
    whole.__class__ = kind
    if not hasattr(split, "deferred_names"):
        raise _unknown_type_error(kind)
    found: list[dict[str, Tensor | None]] = []
    for one in (whole, split):
        given = x.detach().clone()
        given.requires_grad_(given.is_floating_point())
        for p in one.parameters():
            p.grad = None
        with torch.random.fork_rng():
            y = one(given)
        with defer_weight_gradients(DeferredGradients()) as tape:
            numbers = torch.Generator(y.device).manual_seed(0)
            dy = torch.randn(y.shape, generator=numbers, dtype=y.dtype, device=y.device)
            torch.autograd.backward(y, dy)
        tape.run()
        named = {f"the gradient of {name}": p.grad for name, p in one.named_parameters()}
        found.append({"the output": y.detach(), "the gradient of the input": given.grad} | named)
    for name, want in found[0].items():
        got = found[1][name]
        if want is None and got is None:
            continue
        bound = 1e-2 if want is not None and want.dtype.itemsize < 4 else 1e-4
        if want is None or got is None or not _relative_error(got, want) <= bound:
            raise ModelError(f"by the split of {kind.__name__}, {name} is not autograd's")


def _relative_error(got: Tensor, want: Tensor) -> float:
    """By how much of its norm a tensor is off."""
    if got.shape != want.shape:
        return float("inf")
    return float((got - want).double().norm() / want.double().norm().clamp(min=1e-30))


# ------------------------------------------------------------ types


class SplitLinear(nn.Linear):
    """An `nn.Linear` whose weight gradient can be left for later."""

    deferred_names, original_type = ("weight",), nn.Linear

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


class SplitEmbedding(nn.Embedding):
    """An `nn.Embedding` whose gradient can be left for later."""

    deferred_names, original_type = ("weight",), nn.Embedding

    def forward(self, input: Tensor) -> Tensor:
        if _has_special_gradient(self):
            return super().forward(input)
        return embedding(input, self.weight, self.padding_idx)


def _run_conv1d(layer: Any, x: Tensor) -> Tensor:
    return matmul(x, layer.weight, layer.bias)


_SPLIT_TYPES: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: SplitLinear,
    nn.Embedding: SplitEmbedding,
}
_REGISTERED_LAYERS: dict[type[nn.Module], SplitLayer] = {}
_OPT_IN_TYPES: set[type[nn.Module]] = {nn.LayerNorm}
_UNSPLIT_LAYERS: WeakSet[nn.Module] = WeakSet()  # taught layers that ran whole when they ran last
# Of a library that need not be there.
_FORWARDS_BY_TYPE_NAME: dict[str, LayerForward] = {"transformers.pytorch_utils.Conv1D": _run_conv1d}


def _find_split_type(kind: type[nn.Module]) -> type[nn.Module] | None:
    """The class of a type's layers that can be split."""
    if kind not in _SPLIT_TYPES and (
        run := _FORWARDS_BY_TYPE_NAME.get(f"{kind.__module__}.{kind.__qualname__}")
    ):
        _SPLIT_TYPES[kind] = _make_split_type(kind, run)
    return _SPLIT_TYPES.get(kind)


def _make_split_type(kind: type[nn.Module], forward: LayerForward) -> type[nn.Module]:
    """A subclass of a type with that forward, which pickles as how it was made."""
    own = {
        "forward": forward,
        "__reduce_ex__": partialmethod(_reduce_split_layer, kind),
        "deferred_names": (*_REGISTERED_LAYERS[kind].deferred_grads,)
        if kind in _REGISTERED_LAYERS
        else ("weight",),
        "original_type": kind,
    }
    return type(f"Split{kind.__name__}", (kind,), own)


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
        f"how {name} is split is not known", hint=f"register_splittable_layer({name}, ...)"
    )


def _has_special_gradient(layer: Any) -> bool:
    """Whether an embedding's gradient is not simply one of its rows."""
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
    """Of input (0), weight (1) or bias (2)."""
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


# ------------------------------------------------------------ what is left whole


@contextmanager
def watch_accumulation(module: nn.Module) -> Iterator[set[str]]:
    """The names of parameters to which autograd itself adds a gradient within this context."""
    came: set[str] = set()

    def comes(name: str, _: object, gradients: tuple[Tensor | None, ...]) -> None:
        if gradients[0] is not None:
            came.add(name)

    # Held, or each graph would make another node for it.
    trained = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    nodes = {name: get_gradient_edge(p).node for name, p in trained}
    handles = [register_observer(node, partial(comes, name)) for name, node in nodes.items()]
    try:
        yield came
    finally:
        for handle in handles:
            handle.remove()


def describe_unsplit_layers(module: nn.Module, accumulated: set[str], has_split: bool) -> str:
    """What to say of the layers whose parameters `accumulated` in I; nothing where that is cheap.

    If something was split, that is all but matrices, and what is beside layers that were split, as
    positions.
    """
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    matrices = {name for name, p in trained.items() if sum(n > 1 for n in p.shape) > 1}
    layers: dict[str, type[nn.Module]] = {}
    for name in trained:
        owner, dot, _ = name.rpartition(".")
        beside = any(other.startswith(owner + dot) for other in matrices - accumulated)
        if name in accumulated and not (has_split and (beside or name not in matrices)):
            layers[owner] = type(module.get_submodule(owner))
    names = [f"{owner or 'itself'} ({kind.__name__})" for owner, kind in layers.items()]
    if not names:
        return ""
    names[_MAX_NAMED_LAYERS:] = [f"and {len(names) - _MAX_NAMED_LAYERS} more"] * (
        len(names) > _MAX_NAMED_LAYERS
    )
    kinds = {
        kind for kind in layers.values() if not hasattr(kind, "deferred_names")
    } - _OPT_IN_TYPES
    known = sorted(kind.__name__ for kind in kinds if _find_split_type(kind))
    hints = [
        f"; schedir.runtime.make_backward_splittable(stage) splits {' and '.join(known)}"
    ] * bool(known)
    hints += ["; schedir.runtime.register_splittable_layer teaches a type"] * (
        len(known) < len(kinds)
    )
    return f"{', '.join(names)}: I runs their whole backward{''.join(hints)}"


def find_deferrable_weights(module: nn.Module) -> set[str]:
    """The names of weights whose gradients layers could have left for later, as they were made to.

    None of a taught layer that ran whole, as it does under autocast.
    """
    late = {
        layer._parameters.get(name)
        for layer in module.modules()
        for name in getattr(layer, "deferred_names", ())
        if layer not in _UNSPLIT_LAYERS
    }
    return {
        name
        for name, p in module.named_parameters()
        if p in late and can_defer_gradient(p) and not leaf_has_hooks(p, get_gradient_edge(p).node)
    }
