"""Graphs: a rank's whole step as one CUDA graph, with one launch by the host."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only, tree_structure

from schedir.errors import ModelError
from schedir.ir.ops import OFF_COMPUTE, Token
from schedir.ir.program import Program
from schedir.ir.zero import CUT_FROM
from schedir.runtime.batch import Batch, Keywords, Microbatches
from schedir.runtime.executor import WARM, Executor
from schedir.runtime.precision import has_momentum, innermost, is_gated
from schedir.runtime.random import DrawDetector
from schedir.runtime.undone import undone


class GraphedStep:
    """An executor's step, captured once and replayed; the same bits.

    What changes from step to step is written into the graph's own tensors before each replay:
    inputs, targets, `scale` and, of an optimizer, the learning rate of each group, in float32.
    All else is as it was at capture: shapes, and the other numbers of an optimizer.  Parameters
    and the state of the optimizer are left as they were, in their places.

    Over NCCL the graph does one thing after the other, as `Executor.step_in_turn`: CUDA does not
    promise that branches of a graph run beside each other (CUDA C++ Programming Guide, "CUDA
    Graphs"), and in a branch that must wait a receive would hold up what it waits for.  With
    `concurrent` it has the branches of a step; whether that hangs is up to CUDA.

    All ranks must capture at the same step, and replay together.  `close` it before process groups
    are destroyed: NCCL would wait for the graphs that hold its calls (pytorch issue 115388).

    Raises ModelError for an executor that is not on a GPU, for an optimizer that cannot be
    captured, and for a step that draws random numbers: each replay would draw the same.
    """

    def __init__(
        self,
        executor: Executor,
        inputs: Microbatches,
        targets: Microbatches,
        scale: float = 1.0,
        keywords: Keywords = (),
        *,
        concurrent: bool = False,
    ) -> None:
        require_kept(executor)
        require_gpu(executor)
        name, device = executor.program.name, executor.state.device
        if executor.state.ahead is not None:
            raise ModelError(
                "whether a step must be run again (validate 'after') is decided by the host",
                program=name,
                hint="compile(..., validate='before')",
            )
        if executor.state.held.states is not None:
            raise ModelError(
                "the optimizer's states are not on the device, and a graph has every memory in its "
                "place",
                program=name,
                hint="compile(..., states='device')",
            )
        inner = innermost(executor.state.optimizer)
        if inner is not None and not (is_gated(executor.state.optimizer) and has_momentum(inner)):
            raise ModelError(
                f"whether {type(inner).__name__} steps, if gradients are finite, is decided by "
                "the host",
                program=name,
                hint="one of torch.optim with fused=True and without hooks; an SGD with dampening "
                "after its first step",
            )
        self.executor = executor
        self.scale = Number(scale, torch.float64, device)
        given = own_batch(Batch(inputs, targets, self.scale.tensor, keywords), device)
        self.given = given
        self.rates = Rates(executor.state.optimizer, device)
        branches = concurrent or executor.in_turn is None
        step = executor.step if branches else executor.step_in_turn
        aside = torch.cuda.Stream(device)
        aside.wait_stream(torch.cuda.current_stream(device))
        on = torch.cuda.stream(aside)
        with undrawn(executor), on, self.rates.tensors(), undone(executor.state), _unwarned():
            for _ in range(WARM):
                step(*given)
        torch.cuda.current_stream(device).wait_stream(aside)
        torch.cuda.synchronize(device)
        self.graph = torch.cuda.CUDAGraph()
        # Other threads may call CUDA meanwhile: NCCL's watchdog does.
        captured = torch.cuda.graph(self.graph, stream=aside, capture_error_mode="thread_local")
        # Nothing is drawn, and generators cannot be seeded in a capture.
        with self.rates.captured(), executor.draws.seeding([]), captured:
            self.loss = step(*given)
        self.norm = executor.norm

    def step(
        self,
        inputs: Microbatches,
        targets: Microbatches,
        scale: float | None = None,
        keywords: Keywords = (),
    ) -> Tensor | None:
        """As Executor.step, by one launch; the loss is overwritten by the next step.

        `scale` is as in the step before unless told; learning rates are what the optimizer's
        groups say now.  Raises ModelError for other shapes than at capture.
        """
        write(self.given, Batch(inputs, targets, keywords=keywords), self.executor.program)
        if scale is not None:
            self.scale.write(scale)
        self.rates.write()
        self.graph.replay()
        self.executor.state.norm = self.norm  # a step without the graph would have another
        return self.loss

    def close(self) -> None:
        """Let the graph go, when it has run."""
        torch.cuda.synchronize(self.executor.state.device)
        self.graph.reset()


def require_kept(executor: Executor) -> None:
    """Refuse weights whose memory comes and goes, and activations: a graph has addresses.  Raises
    ModelError."""
    if not executor.program.ops.isdisjoint(OFF_COMPUTE[Token.SAVED]):
        raise ModelError(
            "what it offloads comes back to other memory, and a graph has it at one place for ever",
            program=executor.program.name,
            hint="no graph, or no offload",
        )
    if (zero := executor.program.zero) >= CUT_FROM["grads"]:
        raise ModelError(
            f"with zero {zero}, memory is let go and taken again in a step, and a graph has it at "
            "one place for ever",
            program=executor.program.name,
            hint="zero=1, or no graph",
        )


def require_gpu(executor: Executor) -> None:
    """Raise ModelError for an executor that is not on a GPU."""
    if executor.state.device.type != "cuda":
        raise ModelError(
            "a CUDA graph holds what runs on a GPU, "
            f"rank {executor.rank} is on {executor.state.device}",
            program=executor.program.name,
        )


def own_batch(batch: Batch, device: torch.device) -> Batch:
    """The same in memory of its own, where a graph reads it."""
    own = ([*batch.inputs], [*batch.targets], [*map(dict, batch.keywords)])
    inputs, targets, keywords = tree_map_only(Tensor, lambda x: x.to(device, copy=True), own)
    return batch._replace(inputs=inputs, targets=targets, keywords=keywords)


def write(own: Batch, given: Batch, program: Program) -> None:
    """Write microbatches where a graph reads them; all but the scale.  Raises ModelError for others
    than those of its capture."""
    for name in ("inputs", "targets", "keywords"):
        mine, theirs = getattr(own, name), getattr(given, name)
        if len(mine) != len(theirs):
            raise ModelError(
                f"the graph was captured with {len(mine)} microbatches, and is given {len(theirs)}",
                program=program.name,
                hint=f"as many {name} as at its capture",
            )
        pairs = zip(tree_leaves(mine), tree_leaves([*theirs]), strict=False)
        like = tree_structure(mine) == tree_structure([*theirs])
        for x, other in pairs if like else ():
            if not isinstance(x, Tensor) or not isinstance(other, Tensor):
                like = (like and x is other) or x == other
            elif (x.shape, x.dtype) != (other.shape, other.dtype):
                raise ModelError(
                    f"the graph was captured with microbatches of {list(x.shape)} of {x.dtype}, "
                    f"and is given {list(other.shape)} of {other.dtype}",
                    program=program.name,
                )
            else:
                x.copy_(other, non_blocking=True)
        if not like:
            raise ModelError(
                f"the graph was captured with other {name}: only numbers in tensors may change",
                program=program.name,
            )


class Number:
    """A number that a graph reads: a 0-dim tensor, written to when it changes."""

    def __init__(self, value: float, dtype: torch.dtype, device: torch.device) -> None:
        self.value, self.tensor = value, torch.full((), value, dtype=dtype, device=device)

    def write(self, value: float) -> None:
        """Let it be this from now on."""
        if value != self.value:
            self.value = value
            self.tensor.fill_(value)


class Rates:
    """The learning rates of an optimizer's groups, as a graph reads them.

    Raises ModelError for an optimizer that would read them on the host.
    """

    def __init__(self, optimizer: Any, device: torch.device) -> None:
        self.groups: list[dict[str, Any]] = getattr(optimizer, "param_groups", [])
        for group in self.groups:
            if not (group.get("capturable") or group.get("fused")):
                raise ModelError(
                    f"{type(innermost(optimizer)).__name__} cannot be captured: "
                    "its numbers are the host's",
                    hint="fused=True",
                )
        self.numbers = [Number(float(g["lr"]), torch.float32, device) for g in self.groups]

    @contextmanager
    def tensors(self) -> Iterator[None]:
        """Within this context the optimizer has the tensors for its rates."""
        was = [group["lr"] for group in self.groups]
        for group, number in zip(self.groups, self.numbers, strict=True):
            group["lr"] = number.tensor
        try:
            yield
        finally:
            for group, rate in zip(self.groups, was, strict=True):
                group["lr"] = rate

    @contextmanager
    def captured(self) -> Iterator[None]:
        """As `tensors`, for a capture: torch's Adam asks for `capturable`, which its fused one,
        whose numbers are the device's in any case, does not look at."""
        groups = [group for group in self.groups if group.get("capturable") is False]
        for group in groups:
            group["capturable"] = True
        try:
            with self.tensors():
                yield
        finally:
            for group in groups:
                group["capturable"] = False

    def write(self) -> None:
        """Let the tensors be what the groups say."""
        for group, number in zip(self.groups, self.numbers, strict=True):
            number.write(float(group["lr"]))


@contextmanager
def _unwarned() -> Iterator[None]:
    """Within this context torch does not advise against steps by hand of what can be captured."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*constructed with capturable=True", UserWarning)
        yield


@contextmanager
def undrawn(executor: Executor) -> Iterator[None]:
    """Raises ModelError at the end of this context if steps in it have drawn random numbers."""
    detectors = [DrawDetector(generator) for generator in executor.draws.generators]
    with executor.draws.seeding(detectors):
        yield
    if any(generator.drawn for generator in detectors):
        raise ModelError(
            f"a step of rank {executor.rank} draws random numbers, and each replay of a CUDA graph "
            "would draw the same",
            program=executor.program.name,
            hint="run it without a graph, or let nothing draw, as without dropout",
        )
