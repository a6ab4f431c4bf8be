"""Register layers whose backward can be split into dI and dW.

A layer is split by giving it a class of its own, a subclass of its type whose forward is
splittable (see `split`).  Parameters, names, hooks and results stay as they are, bit for bit.
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
from schedir.runtime.autograd.node_hook_detection import can_wait, leaf_has_hooks, observe
from schedir.runtime.autograd.split_backward import (
    DeferredGradients,
    LayerRule,
    SplitLayer,
    embedding,
    halves,
    linear,
    matmul,
    recording,
)

Forward = Callable[[Any, Tensor], Tensor]
_MOST = 6  # layers that a warning names


def make_backward_splittable(module: nn.Module, *also: type[nn.Module]) -> nn.Module:
    """Make linear layers within a module splittable, and others whose types are known, in place.

    These are `nn.Linear`, `nn.Embedding`, the `Conv1D` of Hugging Face's transformers, and what
    `register_splittable_layer` has been told.  Returns the module.  Layers of a subclass are left
    alone, and embeddings with a norm, sparse or scaled gradients.  A weight gets its gradient in I
    where it is used otherwise, as by `nn.MultiheadAttention`, or is computed (pruned,
    parametrized), or has hooks.  Under `torch.compile` nothing may be split: the executor then
    refuses.

    `also` are types that are known and split only where asked for.  That is `nn.LayerNorm`: its
    weights' gradients take a thousandth of the time of a transformer layer's products, and to
    leave them for W the tape keeps its input and output gradient, a quarter more.

    Raises UsageError for a type in `also` that is not known, and ModelError for a layer with a
    parameter of which its split does not tell the gradient.

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
    for kind in also:
        require_type(kind, type, "nn.LayerNorm")
        if _split_type(kind) is None:
            raise _unknown(kind)
    for layer in module.modules():
        kind = _whole_type(layer)  # what is split already is split as was taught last
        asked = kind not in _ASKED_FOR or kind in also or kind is not type(layer)
        split = _split_type(kind) if asked else None
        if split is None or (kind is nn.Embedding and _odd(layer)):
            continue
        if kind in _TAUGHT and (names := _without_rule(layer, _TAUGHT[kind])):
            if _computed(layer, _TAUGHT[kind]):
                continue
            raise ModelError(f"the split of {kind.__name__} says nothing of its {names[0]}")
        layer.__class__ = split
    return module


def _whole_type(layer: nn.Module) -> type[nn.Module]:
    """The type of a layer before it was split, or as it is; of a subclass, that."""
    kind: type[nn.Module] = type(layer).__dict__.get("split_of", type(layer))
    return kind


def _without_rule(layer: nn.Module, how: SplitLayer) -> list[str]:
    """The names of parameters of which its split does not tell the gradient."""
    names = (name for name, _ in layer.named_parameters(remove_duplicate=False))
    return [name for name in names if name not in how.later and name not in how.now]


def _computed(layer: nn.Module, how: SplitLayer) -> bool:
    """Whether a weight that has a rule is computed from others, as where it is pruned."""
    own = dict(layer.named_parameters(remove_duplicate=False))
    return any(
        isinstance(getattr(layer, name, None), Tensor)
        for name in {*how.later, *how.now}.difference(own, layer._buffers)
    )


def register_splittable_layer(
    kind: type[nn.Module],
    *,
    input: LayerRule,
    later: Mapping[str, LayerRule],
    now: Mapping[str, LayerRule] | None = None,
    forward: Callable[[Any, Tensor], tuple[Tensor, ...]] | None = None,
) -> None:
    """Teach `make_backward_splittable` layers of a type, which take one tensor and give one.

    `input(layer, x, dy)` is the gradient of x, where x is what the layer was given and dy the
    gradient of what it gave.  `later` has such a rule for each parameter, by name, whose gradient
    is left for W: until then x and dy are kept.  `now` has those of the others, computed in I.
    A rule gives the gradient of a whole microbatch, in the parameter's shape.  y is what the
    layer's own forward gives; a `forward(layer, x)` gives (y, a, b, ...) instead, and then rules
    are called as `rule(layer, a, b, ..., dy)`: what it keeps must hold what they need.

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
    ...     input=lambda layer, x, dy: dy * layer.weight,
    ...     later={"weight": lambda layer, x, dy: (x * dy).flatten(0, -2).sum(0)},
    ... )
    >>> check_splittable_layer(Scale(8), torch.randn(4, 8))
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise UsageError(
            f"what is split is a type of nn.Module, not {kind!r:.60}",
            hint="register_splittable_layer(nn.Conv2d, ...)",
        )
    how = SplitLayer(forward or partial(_own, kind), input, dict(later), dict(now or {}))
    _TAUGHT[kind] = how

    def run(layer: nn.Module, *given: Any, **named: Any) -> Tensor:
        x, *more = *given, *named.values()
        whole = more or torch.is_autocast_enabled(x.device.type) or _without_rule(layer, how)
        if not torch.compiler.is_compiling():
            (_WHOLE.add if whole else _WHOLE.discard)(layer)
        if whole:
            y: Tensor = kind.forward(layer, *given, **named)
            return y
        return halves(how, layer, x)

    _SPLIT[kind] = _subclass(kind, run)


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
    kind = _whole_type(layer)
    whole, split = deepcopy(layer), make_backward_splittable(deepcopy(layer), *_ASKED_FOR & {kind})
    whole.__class__ = kind
    if not hasattr(split, "split_later"):
        raise _unknown(kind)
    found: list[dict[str, Tensor | None]] = []
    for one in (whole, split):
        given = x.detach().clone()
        given.requires_grad_(given.is_floating_point())
        for p in one.parameters():
            p.grad = None
        with torch.random.fork_rng():
            y = one(given)
        with recording(DeferredGradients()) as tape:
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
        if want is None or got is None or not _off(got, want) <= bound:
            raise ModelError(f"by the split of {kind.__name__}, {name} is not autograd's")


def _off(got: Tensor, want: Tensor) -> float:
    """By how much of its norm a tensor is off."""
    if got.shape != want.shape:
        return float("inf")
    return float((got - want).double().norm() / want.double().norm().clamp(min=1e-30))


# ------------------------------------------------------------ types


class SplitLinear(nn.Linear):
    """An `nn.Linear` whose weight gradient can be left for later."""

    split_later, split_of = ("weight",), nn.Linear

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


class SplitEmbedding(nn.Embedding):
    """An `nn.Embedding` whose gradient can be left for later."""

    split_later, split_of = ("weight",), nn.Embedding

    def forward(self, input: Tensor) -> Tensor:
        if _odd(self):
            return super().forward(input)
        return embedding(input, self.weight, self.padding_idx)


def _conv1d(layer: Any, x: Tensor) -> Tensor:
    return matmul(x, layer.weight, layer.bias)


_SPLIT: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: SplitLinear,
    nn.Embedding: SplitEmbedding,
}
_TAUGHT: dict[type[nn.Module], SplitLayer] = {}
_ASKED_FOR: set[type[nn.Module]] = {nn.LayerNorm}
_WHOLE: WeakSet[nn.Module] = WeakSet()  # taught layers that ran whole when they ran last
# Of a library that need not be there.
_BY_NAME: dict[str, Forward] = {"transformers.pytorch_utils.Conv1D": _conv1d}


def _split_type(kind: type[nn.Module]) -> type[nn.Module] | None:
    """The class of a type's layers that can be split."""
    if kind not in _SPLIT and (run := _BY_NAME.get(f"{kind.__module__}.{kind.__qualname__}")):
        _SPLIT[kind] = _subclass(kind, run)
    return _SPLIT.get(kind)


def _subclass(kind: type[nn.Module], run: Forward) -> type[nn.Module]:
    """A subclass of a type with that forward, which pickles as how it was made."""
    own = {
        "forward": run,
        "__reduce_ex__": partialmethod(_reduced, kind),
        "split_later": (*_TAUGHT[kind].later,) if kind in _TAUGHT else ("weight",),
        "split_of": kind,
    }
    return type(f"Split{kind.__name__}", (kind,), own)


def _reduced(layer: nn.Module, kind: type[nn.Module], protocol: int) -> tuple[Any, ...]:
    state = kind.__reduce_ex__(layer, protocol)[2:]
    return _remade, (kind,), *state


def _remade(kind: type[nn.Module]) -> nn.Module:
    split = _split_type(kind)
    if split is None:
        raise _unknown(kind)
    return split.__new__(split)


def _unknown(kind: type[nn.Module]) -> UsageError:
    name = kind.__name__
    return UsageError(
        f"how {name} is split is not known", hint=f"register_splittable_layer({name}, ...)"
    )


def _odd(layer: Any) -> bool:
    """Whether an embedding's gradient is not simply one of its rows."""
    return bool(layer.max_norm or layer.sparse or layer.scale_grad_by_freq)


def _own(kind: type[nn.Module], layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    return kind.forward(layer, x), x


def _norm(layer: nn.LayerNorm, x: Tensor) -> tuple[Tensor, ...]:
    shape = list(layer.normalized_shape)
    y, mean, rstd = torch.native_layer_norm(x, shape, layer.weight, layer.bias, layer.eps)
    return y, x, mean, rstd


def _norm_gradient(
    k: int, layer: nn.LayerNorm, x: Tensor, mean: Tensor, rstd: Tensor, dy: Tensor
) -> Tensor:
    """Of input (0), weight (1) or bias (2)."""
    gradients: tuple[Tensor, ...] = torch.ops.aten.native_layer_norm_backward(
        dy, x, layer.normalized_shape, mean, rstd, layer.weight, layer.bias,
        [k == 0, k == 1, k == 2],
    )  # fmt: skip
    return gradients[k]


register_splittable_layer(
    nn.LayerNorm,
    forward=_norm,
    input=partial(_norm_gradient, 0),
    later={"weight": partial(_norm_gradient, 1), "bias": partial(_norm_gradient, 2)},
)


# ------------------------------------------------------------ what is left whole


@contextmanager
def watching(module: nn.Module) -> Iterator[set[str]]:
    """The names of parameters to which autograd itself adds a gradient within this context."""
    came: set[str] = set()

    def comes(name: str, _: object, gradients: tuple[Tensor | None, ...]) -> None:
        if gradients[0] is not None:
            came.add(name)

    # Held, or each graph would make another node for it.
    trained = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    nodes = {name: get_gradient_edge(p).node for name, p in trained}
    handles = [observe(node, partial(comes, name)) for name, node in nodes.items()]
    try:
        yield came
    finally:
        for handle in handles:
            handle.remove()


def left_whole(module: nn.Module, came: set[str], split: bool) -> str:
    """What to say of the layers whose parameters `came` in I; nothing where that is cheap.

    If something was split, that is all but matrices, and what is beside layers that were split, as
    positions.
    """
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    matrices = {name for name, p in trained.items() if sum(n > 1 for n in p.shape) > 1}
    layers: dict[str, type[nn.Module]] = {}
    for name in trained:
        owner, dot, _ = name.rpartition(".")
        beside = any(other.startswith(owner + dot) for other in matrices - came)
        if name in came and not (split and (beside or name not in matrices)):
            layers[owner] = type(module.get_submodule(owner))
    names = [f"{owner or 'itself'} ({kind.__name__})" for owner, kind in layers.items()]
    if not names:
        return ""
    names[_MOST:] = [f"and {len(names) - _MOST} more"] * (len(names) > _MOST)
    kinds = {kind for kind in layers.values() if not hasattr(kind, "split_later")} - _ASKED_FOR
    known = sorted(kind.__name__ for kind in kinds if _split_type(kind))
    hints = [
        f"; schedir.runtime.make_backward_splittable(stage) splits {' and '.join(known)}"
    ] * bool(known)
    hints += ["; schedir.runtime.register_splittable_layer teaches a type"] * (
        len(known) < len(kinds)
    )
    return f"{', '.join(names)}: I runs their whole backward{''.join(hints)}"


def could_wait(module: nn.Module) -> set[str]:
    """The names of weights whose gradients layers could have left for later, as they were made to.

    None of a taught layer that ran whole, as it does under autocast.
    """
    late = {
        layer._parameters.get(name)
        for layer in module.modules()
        for name in getattr(layer, "split_later", ())
        if layer not in _WHOLE
    }
    return {
        name
        for name, p in module.named_parameters()
        if p in late and can_wait(p) and not leaf_has_hooks(p, get_gradient_edge(p).node)
    }
