"""Sizes, from the model: what one microbatch of each stage keeps, found by running it once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from schedir.errors import ModelError, said
from schedir.ir.sizes import Sizes
from schedir.runtime.buffers import restored
from schedir.runtime.given import loss_of, model_of, one_number
from schedir.runtime.lender import Lender
from schedir.runtime.rank import Boundary, Loss
from schedir.runtime.split import Tape, recording


def sizes_of(
    stages: Sequence[nn.Module | None],
    input: Tensor,
    target: Tensor,
    *,
    loss: Loss,
    boundary: Boundary | Sequence[int],
    state: float = 8.0,
    frozen: int = 0,
) -> Sizes:
    """The Sizes of a model of those stages, in order; those of None, which others hold, are 0.

    `input` is one microbatch of the first stage's, `target` of the loss's; other stages get zeros.
    `state` is how many bytes an optimizer holds for each number that is trained: 8 are AdamW's
    two moments in float32.  The first `frozen` stages keep nothing of a microbatch, as in a
    program with so many, and the stage behind them nothing for a gradient of its input.

    `saved` is the input of a stage and what autograd saves, each storage once; `tape` is what is
    left for a BackwardWeight, and `both` the most that there is of the two at once in a
    BackwardInput, in which autograd lets go what was saved as it is done with it.  Parameters,
    buffers, the model's input and the target are in none: they are there all the time.  Of a
    checkpointed part what it keeps is counted, and not what it makes again.  Nothing counts that
    an instruction needs only while it runs.

    Gradients, buffers and random numbers are left as they were.  Hooks run, and stages that talk
    within their tensor-parallel group do: all its ranks must call this.  Raises ModelError where
    a stage gives what cannot pass the boundary, and for arguments of another kind.

    >>> import torch
    >>> from torch import nn
    >>> from schedir.runtime import sizes_of
    >>> stages, x = [nn.Linear(64, 64), nn.Linear(64, 64)], torch.ones(8, 64)
    >>> sizes = sizes_of(stages, x, x, loss=nn.functional.mse_loss, boundary=(8, 64))
    >>> sizes.activation, sizes.saved, sizes.weights  # bytes; of saved and weights for each stage
    (2048.0, (0.0, 4096.0), (66560.0, 66560.0))
    """
    boundary, loss = Boundary.of(boundary), loss_of(loss)
    for what, given in (("input", input), ("target", target)):
        if not isinstance(given, Tensor):
            raise ModelError(f"{what} is a microbatch, one tensor, not {said(given)}")
    stages = model_of(stages, holes=True)
    found = [
        _stage(stages, s, input, target, loss, boundary, state, frozen)
        if stage is not None
        else _Kept()
        for s, stage in enumerate(stages)
    ]
    activation = torch.Size(boundary.shape).numel() * boundary.dtype.itemsize
    return Sizes(
        activation=activation,
        saved=tuple(kept.saved for kept in found),
        tape=tuple(kept.tape for kept in found),
        both=tuple(kept.both for kept in found),
        weights=tuple(kept.weights for kept in found),
        version=tuple(kept.version for kept in found),
    )


class _Kept(NamedTuple):
    """Bytes that one stage keeps."""

    saved: float = 0.0
    tape: float = 0.0
    both: float = 0.0
    weights: float = 0.0
    version: float = 0.0


def _stage(
    stages: Sequence[nn.Module | None],
    s: int,
    input: Tensor,
    target: Tensor,
    loss: Loss,
    boundary: Boundary,
    state: float,
    frozen: int,
) -> _Kept:
    """What stage `s` keeps."""
    module, last = stages[s], s == len(stages) - 1
    assert module is not None
    device = next((p.device for p in module.parameters()), input.device)
    x, target = input.to(device), target.to(device)
    always = {*_storages([x, target, *module.parameters(), *module.buffers()])}

    def size(tensors: Iterable[Tensor]) -> int:
        return sum(n for at, n in _storages(tensors).items() if at not in always)

    if s:
        x = torch.zeros(boundary.shape, dtype=boundary.dtype, device=device)
        x.requires_grad_(s > frozen)
    packed: WeakSet[_Packed] = WeakSet()  # what the graph has let go is not in it

    def pack(tensor: Tensor) -> _Packed:
        # Detached: what a node saves of its own output would keep the node, for ever.
        packed.add(one := _Packed(tensor.detach()))
        return one

    with _as_before(module, device), torch.set_grad_enabled(s >= frozen):
        with saved_tensors_hooks(pack, lambda one: one.tensor):
            # Of a model's own inputs, which are there, a module that writes gets a copy.
            lent, lender = x if s else x.clone(), Lender()
            y, _ = lender.run(module, lent, ours=True)
            if not lender.writes[module.training]:
                always |= {*_storages([lent])} - {*_storages([x] if s else [])}
            if last:
                y = one_number(loss(y, target))
            else:
                boundary.expect(y, s)
        kept = [x] if x.requires_grad else []
        tape = _PeakTape(lambda t: size([*kept, *(one.tensor for one in packed), *t.tensors()]))
        saved = tape.most
        if y.requires_grad:
            with recording(tape):
                torch.autograd.backward(y, None if last else torch.zeros_like(y))
    trained = [p for p in module.parameters() if p.requires_grad]
    parts = [*module.parameters(), *module.buffers()]
    weights = sum(_storages(parts).values())
    weights += sum(p.numel() * (p.grad_dtype or p.dtype).itemsize for p in trained)
    return _Kept(
        saved,
        size(tape.tensors()),
        tape.most,
        weights + state * sum(p.numel() for p in trained),
        sum(p.numel() * p.dtype.itemsize for p in trained),
    )


class _PeakTape(Tape):
    """A tape, and the most bytes of what is saved and what is on it that there were at once.

    That only grows as the tape does.
    """

    def __init__(self, held: Callable[[Tape], int]) -> None:
        super().__init__()
        self.held, self.most = held, held(self)

    def defer(self, *job: Any) -> None:
        super().defer(*job)
        self.most = max(self.most, self.held(self))


class _Packed:
    """A tensor that autograd saves."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Address and bytes of the memory of tensors that are all there, each once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


@contextmanager
def _as_before(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Leaves gradients, buffers and the state of random numbers as they were."""
    gradients = [(p, p.grad) for p in module.parameters()]
    try:
        with restored(module, device):
            for p, _ in gradients:
                p.grad = None
            yield
    finally:
        for p, gradient in gradients:
            p.grad = gradient
