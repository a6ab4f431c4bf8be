"""Executor: runs one rank's Stream.

The Stream is linked once into bound calls, with peers, buffers and neighbours resolved; a step
is a loop over them.  What moves the tensors is a Transport, in which order the calls are made
is the caller's choice among the legal ones: a process makes them in Stream order.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from schedir.check import check
from schedir.errors import ExecutionError, ModelError, Site
from schedir.ops import ROWS, Instr, Lane, Opcode
from schedir.parallel.group import is_sharded
from schedir.program import Program
from schedir.runtime.gradients import Gradients
from schedir.runtime.split import Tape, recording
from schedir.runtime.transport import Done, Transport, Work

T = TypeVar("T")
Loss = Callable[[Tensor, Tensor], Tensor]
Microbatches = Sequence[Tensor] | Tensor  # one tensor each, or stacked


@dataclass(frozen=True)
class Boundary:
    """Shape and type of what passes between stages, for one microbatch."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32


class Call(NamedTuple):
    """A linked instruction: first wait for what must have arrived, if anything, then run."""

    wait: Callable[[], None] | None
    run: Callable[[], None]


class _Stage:
    """One own stage: its module, and the slots of its values, one per microbatch."""

    def __init__(self, module: nn.Module, microbatches: int) -> None:
        self.module = module
        self.gradients = Gradients(module)
        self.act_in: list[Tensor | None] = [None] * microbatches
        self.act_out: list[Tensor | None] = [None] * microbatches
        self.saved: list[tuple[Tensor, Tensor] | None] = [None] * microbatches
        self.grad_in: list[Tensor | None] = [None] * microbatches
        self.grad_out: list[Tensor | None] = [None] * microbatches
        self.tape: list[Tape | None] = [None] * microbatches
        self.arriving: dict[tuple[Lane, int], Work] = {}
        self.reducing: Work = Done()
        self.warned = False  # that the module cannot be split

    @property
    def tied_weight(self) -> nn.Parameter | None:
        """The copy of the tied weight that this stage holds, if it says so."""
        weight: nn.Parameter | None = getattr(self.module, "tied_weight", None)
        return weight


class Executor:
    """One rank of a program, ready to run steps.

    `stages` are the rank's own stages, any modules: `module(x) -> y`, the first takes inputs,
    the last gives what `loss(y, target)` sums up.  All others take and give tensors of
    `boundary`.  `optimizer.step()` runs at OptimizerStep, after gradients are scaled to a
    global norm of at most `max_norm` if the program clips.

    With a tied weight, the modules of first and last stage name their copies `tied_weight`.

    Raises ModelError where modules, transport and program do not go together, and whatever
    `check` raises where the program is not proven for the transport.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        stages: Mapping[int, nn.Module],
        transport: Transport,
        *,
        loss: Loss,
        boundary: Boundary,
        optimizer: torch.optim.Optimizer | None = None,
        max_norm: float = 1.0,
    ) -> None:
        self.program, self.rank, self.transport = check(program, transport.model), rank, transport
        self.plan, self.boundary, self.loss = program.plan, boundary, loss
        self.optimizer, self.max_norm = optimizer, max_norm
        self._fits(stages)
        m = self.plan.microbatches
        self.stages = {s: _Stage(stages[s], m) for s in self.plan.stages_of[rank]}
        self.norm = torch.zeros((), dtype=torch.float64)
        self.norming: Work = Done()
        self.inputs: Microbatches = ()
        self.targets: Microbatches = ()
        self.scale = 1.0
        self.losses = [torch.zeros(())] * m
        self.sending: deque[tuple[Work, Tensor]] = deque()
        self.position = 0  # index in the Stream: where this rank stands
        self.stream = program.streams[rank]
        size = len(self.stream)
        self.began, self.ended = [0.0] * size, [0.0] * size
        self._of = {tuple(i): k for k, i in enumerate(self.stream)}
        self.calls = [_LINKS[i.op](self, i) for i in self.stream]

    def _fits(self, stages: Mapping[int, nn.Module]) -> None:
        program, t = self.program, self.transport
        own = self.plan.stages_of[self.rank]

        def refuse(fact: str, hint: str = "") -> None:
            raise ModelError(fact, program=program.name, hint=hint)

        if sorted(stages) != list(own):
            refuse(f"rank {self.rank} owns stages {list(own)}, but is given {sorted(stages)}")
        if (program.tp, program.dp) != (t.tp, t.dp):
            refuse(
                f"the program is for tp {program.tp} and dp {program.dp}, the transport has "
                f"tp {t.tp} and dp {t.dp}"
            )
        size = torch.Size(self.boundary.shape).numel()
        if size % program.tp:
            refuse(f"a boundary of {size} numbers is not divisible by tp {program.tp}")
        holds = {s for s in own if getattr(stages[s], "tied_weight", None) is not None}
        should = {0, self.plan.stages - 1} & {*own} if program.tied else set()
        if self.plan.stages > 1 and holds != should:
            if holds - should:
                refuse(
                    f"stage {min(holds - should)} holds a copy of a tied weight, but the program "
                    "does not reduce it",
                    "compile(..., tied=True)",
                )
            refuse(f"the program reduces a tied weight, but stage {min(should)} names none")

    # ------------------------------------------------------------ a step

    def step(
        self, inputs: Microbatches, targets: Microbatches, scale: float = 1.0
    ) -> Tensor | None:
        """Run the whole Stream once, in its order.

        `inputs[mb]` is what the first stage takes and `targets[mb]` what the loss of the last
        is taken against; ranks that hold neither may give empty ones.  Gradients are those of
        `scale` times the sum of all losses.  Returns that sum of losses, unscaled, on the rank
        of the last stage, and None elsewhere.

        Raises ExecutionError that names the instruction.
        """
        self.begin(inputs, targets, scale)
        for k in range(len(self.calls)):
            self.call(k)
        return self.finish()

    def begin(self, inputs: Microbatches, targets: Microbatches, scale: float) -> None:
        """Make ready for a step; then every call is made once, in a legal order."""
        m = self.plan.microbatches
        for name, given, where in (("inputs", inputs, 0), ("targets", targets, -1)):
            if where % self.plan.stages in self.stages and len(given) != m:
                raise ExecutionError(
                    f"rank {self.rank} is given {len(given)} {name} for {m} microbatches",
                    program=self.program.name,
                )
        self.inputs, self.targets, self.scale = inputs, targets, scale
        for stage in self.stages.values():
            stage.gradients.zero()

    def call(self, k: int) -> None:
        """Run the instruction at index k of the Stream."""
        self.position = k
        wait, run = self.calls[k]
        try:
            if wait is not None:
                wait()
            self.began[k] = perf_counter()
            run()
            self.ended[k] = perf_counter()
        except Exception as error:
            what = str(error).strip().partition("\n")[0] or type(error).__name__
            raise ExecutionError(
                f"{type(error).__name__}: {what}",
                program=self.program.name,
                sites=[Site(self.rank, k, self.stream[k], "failed")],
            ) from error

    def finish(self) -> Tensor | None:
        """End a step: everything that is still on its way out is waited for."""
        while self.sending:
            self.sending.popleft()[0].wait()
        if self.plan.stages - 1 not in self.stages:
            return None
        return sum(self.losses, torch.zeros(()))  # by microbatch, whatever their order was

    # ------------------------------------------------------------ compute

    def _forward(self, i: Instr) -> Call:
        stage, mb, last = self.stages[i.stage], i.mb, i.stage == self.plan.stages - 1
        after = self.stages.get(i.stage + 1)
        grad = self.program.trains

        def run() -> None:
            x = self.inputs[mb] if i.stage == 0 else _take(stage.act_in, mb)
            with torch.set_grad_enabled(grad):
                if i.stage > 0:
                    x.requires_grad_(grad)
                y: Tensor = stage.module(x)
                if last:
                    y = self.loss(y, self.targets[mb])
            if last:
                self.losses[mb] = y.detach()
            elif after is not None:
                after.act_in[mb] = y.detach()
            else:
                stage.act_out[mb] = y.detach()
            if grad:
                stage.saved[mb] = (x, y)

        return Call(self._arrived(i, Lane.ACT), run)

    def _backward(self, i: Instr) -> Call:
        stage, mb = self.stages[i.stage], i.mb
        before = self.stages.get(i.stage - 1)
        last = i.stage == self.plan.stages - 1

        def run() -> None:
            x, y = _take(stage.saved, mb)
            dy = None if last else _take(stage.grad_in, mb)
            torch.autograd.backward(y, dy)
            if i.stage == 0:
                return
            dx, x.grad = x.grad, None
            if dx is None:
                raise ModelError(f"the output of stage {i.stage} does not depend on its input")
            if before is not None:
                before.grad_in[mb] = dx
            else:
                stage.grad_out[mb] = dx

        return Call(self._arrived(i, Lane.GRAD), run)

    def _backward_input(self, i: Instr) -> Call:
        stage, mb = self.stages[i.stage], i.mb
        wait, whole = self._backward(i)

        def run() -> None:
            tape = stage.tape[mb] = Tape()
            with recording(tape):
                whole()
            if not len(tape) and stage.gradients.parameters and not stage.warned:
                stage.warned = True
                warnings.warn(
                    f"{type(stage.module).__name__} (stage {i.stage}) cannot be split: "
                    "I runs its whole backward and W nothing",
                    stacklevel=2,
                )

        return Call(wait, run)

    def _backward_weight(self, i: Instr) -> Call:
        stage, mb = self.stages[i.stage], i.mb
        return Call(None, lambda: _take(stage.tape, mb).run())

    # ------------------------------------------------------------ transfers

    def _send(self, i: Instr) -> Call:
        stage, mb, row = self.stages[i.stage], i.mb, ROWS[i.op]
        values = stage.act_out if i.op == Opcode.SendAct else stage.grad_out
        peer = int(self.plan.rank_of[i.stage + row.hop])

        def run() -> None:
            tensor = _take(values, mb).contiguous()
            # The reference stays until the send has ended: freed earlier, it may be reused.
            self.sending.append((self.transport.send(tensor, peer, row.lane), tensor))

        return Call(None, run)

    def _recv(self, i: Instr) -> Call:
        stage, mb, row = self.stages[i.stage], i.mb, ROWS[i.op]
        act = i.op == Opcode.RecvAct
        values = stage.act_in if act else stage.grad_in
        peer = int(self.plan.rank_of[i.stage + row.hop])
        gather = Opcode.Gather if act else Opcode.GatherGrad
        shape = self.boundary.shape
        if (gather, i.stage, mb) in self._of:
            shape = (torch.Size(shape).numel() // self.program.tp,)

        def run() -> None:
            buffer = torch.empty(shape, dtype=self.boundary.dtype)
            values[mb] = buffer
            stage.arriving[row.lane, mb] = self.transport.recv(buffer, peer, row.lane)

        return Call(None, run)

    def _arrived(self, i: Instr, lane: Lane) -> Callable[[], None] | None:
        """Waits until what an instruction takes in is there, if it comes by message."""
        receive = Opcode.RecvAct if lane is Lane.ACT else Opcode.RecvGrad
        k = self._of.get((receive, i.stage, i.mb))
        if k is None:
            return None
        stage, key = self.stages[i.stage], (lane, i.mb)

        def wait() -> None:
            work = stage.arriving.pop(key, None)
            if work is not None:  # else a gather has waited already
                work.wait()
                self.ended[k] = perf_counter()

        return wait

    def _scatter(self, i: Instr) -> Call:
        stage, mb = self.stages[i.stage], i.mb
        values = stage.act_out if i.op == Opcode.Scatter else stage.grad_out

        def run() -> None:
            flat = _take(values, mb).reshape(self.program.tp, -1)
            # Own memory, not a view: the whole is not kept alive by what is sent of it.
            values[mb] = flat[self.transport.tp_rank].clone()

        return Call(None, run)

    def _gather(self, i: Instr) -> Call:
        stage, mb = self.stages[i.stage], i.mb
        act = i.op == Opcode.Gather
        values = stage.act_in if act else stage.grad_in

        def run() -> None:
            whole = torch.empty(self.boundary.shape, dtype=self.boundary.dtype)
            self.transport.all_gather(whole.view(-1), _take(values, mb)).wait()
            values[mb] = whole

        return Call(self._arrived(i, Lane.ACT if act else Lane.GRAD), run)

    # ------------------------------------------------------------ reductions and step

    def _reduce_grads(self, i: Instr) -> Call:
        stage = self.stages[i.stage]

        def run() -> None:
            stage.gradients.flat.mul_(self.scale)
            if self.program.dp > 1:
                stage.reducing = self.transport.all_reduce(stage.gradients.flat, "dp")

        return Call(None, run)

    def _reduced(self) -> None:
        """Waits until the gradients of all own stages are reduced."""
        for stage in self.stages.values():
            stage.reducing.wait()
            stage.reducing = Done()

    def _reduce_tied(self, i: Instr) -> Call:
        stage = self.stages[i.stage]
        both = {0, self.plan.stages - 1} <= {*self.stages}

        def grad(stage: _Stage) -> Tensor:
            assert stage.tied_weight is not None and stage.tied_weight.grad is not None
            return stage.tied_weight.grad

        def run() -> None:
            if both:  # the copies are on one rank: first plus last, written to both
                last = grad(self.stages[self.plan.stages - 1])
                last.copy_(grad(stage).add_(last))
            else:
                stage.reducing = self.transport.all_reduce(grad(stage), "tied")

        return Call(self._reduced, run)

    def _reduce_norm(self, i: Instr) -> Call:
        counted = [
            p
            for s, stage in self.stages.items()
            for p in stage.gradients.parameters
            # What several ranks hold in full is counted by one of them.
            if (is_sharded(p) or self.transport.tp_rank == 0)
            and not (self.program.tied and s > 0 and p is stage.tied_weight)
        ]

        def run() -> None:
            squares = [p.grad.double().square().sum() for p in counted if p.grad is not None]
            self.norm = torch.stack(squares).sum() if squares else torch.zeros(()).double()
            self.norming = self.transport.all_reduce(self.norm, "model")

        return Call(self._reduced, run)

    def _step(self, i: Instr) -> Call:
        def wait() -> None:
            self._reduced()
            self.norming.wait()
            self.norming = Done()

        def run() -> None:
            if self.program.clip:
                self.norm = self.norm.sqrt()
                shrink = min(1.0, self.max_norm / (float(self.norm) + 1e-6))
                for stage in self.stages.values():
                    stage.gradients.flat.mul_(shrink)
            if self.optimizer is not None:
                self.optimizer.step()

        return Call(wait, run)


def _take(slots: list[T | None], mb: int) -> T:
    value, slots[mb] = slots[mb], None
    assert value is not None, "the checker proves that every value is there"
    return value


# A handler for every row of the instruction table.
_LINKS: dict[Opcode, Callable[[Executor, Instr], Call]] = {
    Opcode.Forward: Executor._forward,
    Opcode.Backward: Executor._backward,
    Opcode.BackwardInput: Executor._backward_input,
    Opcode.BackwardWeight: Executor._backward_weight,
    Opcode.SendAct: Executor._send,
    Opcode.RecvAct: Executor._recv,
    Opcode.SendGrad: Executor._send,
    Opcode.RecvGrad: Executor._recv,
    Opcode.Scatter: Executor._scatter,
    Opcode.Gather: Executor._gather,
    Opcode.ScatterGrad: Executor._scatter,
    Opcode.GatherGrad: Executor._gather,
    Opcode.ReduceGrads: Executor._reduce_grads,
    Opcode.ReduceTied: Executor._reduce_tied,
    Opcode.ReduceNorm: Executor._reduce_norm,
    Opcode.OptimizerStep: Executor._step,
}
