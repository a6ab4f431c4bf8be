"""Executor: runs one rank's Stream.

The Stream is linked once into bound calls, with peers, buffers and neighbours resolved; a step
is a loop over them.  What moves the tensors is a Transport, in which order the calls are made
is the caller's choice among the legal ones: a process makes them in Stream order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from time import monotonic_ns
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from schedir.analysis.graph import Graph
from schedir.analysis.one_order import one_order
from schedir.dumps.box import AT, SINCE
from schedir.errors import ExecutionError, ModelError, flag
from schedir.ir.program import Program
from schedir.ir.ties import Ties
from schedir.runtime import given
from schedir.runtime.agreement import agreed
from schedir.runtime.batch import Batch, Keywords, Microbatches
from schedir.runtime.boundary import Edges, Given
from schedir.runtime.handlers import linked
from schedir.runtime.per_microbatch import Passing, PerMicrobatch
from schedir.runtime.precision import LossScale, Steps
from schedir.runtime.random import Draws
from schedir.runtime.rank import Loss, State, device_of
from schedir.runtime.recorder import Recorded, Stamps, stamps_of
from schedir.runtime.stage import Stage
from schedir.runtime.stands import Stands
from schedir.runtime.undone import WARM as WARM
from schedir.runtime.undone import Noted, Unstepped, warm_up
from schedir.runtime.whole import whole
from schedir.traces.marks import marks_of
from schedir.transports.in_turn import InTurn
from schedir.transports.transport import Transport


class Executor(Stands):
    """One rank of a program, ready to run steps.

    `stages` are the rank's own stages by number, or all of the model in order, of which it takes
    its own; they are any modules: `module(*tensors, **keywords)`, the first takes inputs, the last
    gives what `loss(y, target)` sums up.  `optimizer.step()` runs at OptimizerStep, after gradients
    are scaled to a global norm of at most `max_norm`, 1 unless told, if the program clips; of one
    that does not, a `max_norm` is refused.  With a `loss_scale`, gradients are those of the scaled
    loss until they are reduced.

    What others take and give, a tensor or a tuple of them, is `boundary`: a Boundary or a shape;
    several Boundaries for several tensors; or, where edges differ, a mapping from each stage but
    the last to what it gives; or, where microbatches differ, PerMicrobatch of these.
    `boundaries_of` finds it for a microbatch.  A tensor with a gradient depends on what
    is trained, or on what came in with one; one without is passed on detached.  What a stage does
    not use has a gradient of zeros.

    An update is made only where it is finite, losses and gradients; else weights and the state of
    the optimizer stay as they are, but not buffers that a forward writes, as running statistics.
    `finite`, bool of shape (updates,) on the rank's device, says it of each update of the last
    step.  If the program clips, all ranks judge by the norm and come to the same; if not, each by
    its own gradients, and others may step: then copies of one weight, tied or of tensor-parallel
    ranks, are no longer the same.  `compile(..., clip=True)` with a `max_norm` of infinity clips
    nothing.  torch's own fused optimizers are told on the device; for any other, and for one with
    hooks on its step, the host reads it, and on a GPU waits.

    `tied` says which parameters are copies of one weight: `schedir.ties(stages)`, made of all the
    stages, the same in every process.  It may be left out where a process sees it, as its stages
    have one Parameter, and where modules name their copy, in an attribute `tied_weight`.  Each
    copy keeps a gradient of its own; these are added once, in the order of stages, all copies get
    the sum, and norm and optimizer count the weight once.  Processes compare their parameters:
    trained ones of different stages that are equal, not constant and not tied are refused, unless
    `alike` says that stages may have been seeded alike.  Between steps a Parameter that stages
    share is in all of them; within a step all but the first compute with one that stands in.

    If the program validates "after", an update waits for no norm, and may be made again, with the
    step behind it (`runtime/ahead.py`): `settle` before anybody looks at weights.

    With `zero` from 1 on (ZeRO, arXiv 1910.02054) each of `dp` replicas keeps a part of what they
    share.  Between steps a trained parameter is then the replica's piece of it, 1-dim, and so is
    its gradient; the optimizer, which must be elementwise, steps pieces.  `whole` shows weights.

    Under tensor parallelism, a parameter of which each rank holds a slice has an attribute
    `shard_dim`, the dimension along which it is cut; others are held whole by all, and the global
    norm counts them once.  `copies` is an InProcess's, in which ranks share Parameters.

    What is trained is settled when the executor is made.  A step after a change to that, by
    `requires_grad_` or by a new Parameter, is refused.

    Whatever modules draw from torch's default generators is decided by `seed`, the step, the
    microbatch and the stage, as `schedir.runtime.random` says; after a step the generators are as
    they were before it.  With None for a seed modules draw as they come.

    With `adds`, a step adds to the gradients that there are, as autograd does, and leaves the rest
    to others: no optimizer, norm or sum over replicas, and nothing is judged to be finite.

    With `record`, `stamps` notes when each instruction begins and ends; the attribute of that name
    may be turned off and on between steps.  Under torch.profiler, an instruction is a range that
    says which it is, in torch's words where it has any (`PP:0F3`, `PP:1REDUCE_GRAD`, `PP:step`).

    What is recomputed must give what it gave the first time.  On a CPU a sum of its bits is looked
    at; on a GPU so with `debug`, for which the host waits.

    All processes of a transport make theirs together: it compares what they must agree on.
    Raises ModelError where they do not, or where modules, transport and program do not go
    together, and whatever `check` raises where the program is not proven for the transport.

    >>> import schedir, torch
    >>> from torch import distributed, nn
    >>> from schedir.runtime import Executor, Gloo
    >>> distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    >>> plan = schedir.Plan(ranks=1, microbatches=4, stages_per_rank=2)
    >>> program = schedir.compile(schedir.schedules.interleaved, plan)
    >>> stages, loss = [nn.Linear(8, 8), nn.Linear(8, 1)], nn.functional.mse_loss
    >>> sgd = torch.optim.SGD([p for stage in stages for p in stage.parameters()], lr=0.01)
    >>> how = dict(loss=loss, boundary=(2, 8), optimizer=sgd)
    >>> rank = Executor(program, 0, stages, Gloo(program), **how)  # of several, each makes its own
    >>> x, y = torch.ones(4, 2, 8), torch.ones(4, 2, 1)  # of each microbatch two samples
    >>> bool(rank.step(x, y) > rank.step(x, y))  # it has learned
    True
    >>> distributed.destroy_process_group()
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        stages: Mapping[int, nn.Module] | Sequence[nn.Module],
        transport: Transport,
        *,
        loss: Loss,
        boundary: Given | Edges | PerMicrobatch | Passing,
        optimizer: Steps | None = None,
        max_norm: float | None = None,
        loss_scale: LossScale | None = None,
        seed: int | None = 0,
        tied: Ties | None = None,
        alike: bool = False,
        copies: Mapping[nn.Parameter, nn.Parameter] = MappingProxyType({}),
        adds: bool = False,
        record: bool = True,
        debug: bool = False,
    ) -> None:
        program = given.program_of(program)
        passing = Passing.of(boundary, program)
        stages = given.stages_of(stages, program, given.rank_of(rank, program))
        given.loss_of(loss), given.optimizer_of(optimizer)
        max_norm, seed = (
            given.max_norm_of(max_norm, program),
            None if seed is None else given.seed_of(seed),
        )
        alike, adds, record = flag(alike, "alike"), flag(adds, "adds"), flag(record, "record")
        debug = flag(debug, "debug")
        transport, loss_scale = given.transport_of(transport), given.loss_scale_of(loss_scale)
        weights = agreed(
            program, rank, stages, transport, passing,
            optimizer, max_norm, loss_scale, seed, tied, alike=alike, adds=adds,
        )  # fmt: skip
        self.record, self.profiled = record, False
        self.in_turn = InTurn(transport) if transport.static else None
        self.warm, transport = self.in_turn is None, self.in_turn or transport
        self.stamps: Stamps | None = None
        if record:
            self.stamps = stamps_of(program, rank, transport.model, device_of(stages))
            transport = Recorded(transport, self.stamps)
        self.state = State(
            program, rank, stages, transport, loss, passing,
            optimizer, max_norm, loss_scale, seed, weights, copies, adds, debug,
        )  # fmt: skip
        if self.stamps is not None:
            self.state.as_of = self.stamps.as_of
        self.unstepped = Unstepped(self.state)
        super().__init__()
        self.under_way = False  # in a step, or one that has failed
        self.calls = linked(self.state)
        self.state.cut()

    @property
    def program(self) -> Program:
        """What is run."""
        return self.state.program

    @property
    def rank(self) -> int:
        """Which of the pipeline's ranks this is."""
        return self.state.rank

    @property
    def stages(self) -> Mapping[int, Stage]:
        """Own stages by number, with their modules and gradients."""
        return self.state.stages

    @property
    def draws(self) -> Draws:
        """What modules draw from; its `step` is the number of the next step."""
        return self.state.draws

    @property
    def norm(self) -> Tensor:
        """The global norm of the last update's gradients before clipping, if the program clips:
        0-dim, float64, on the rank's device."""
        return self.state.norm_and_finite()[0]

    @property
    def finite(self) -> Tensor:
        """Of each update of the last step whether it was made: bool, on the rank's device."""
        return self.state.norm_and_finite()[1]

    def step(
        self,
        inputs: Microbatches,
        targets: Microbatches,
        scale: float | Tensor = 1.0,
        keywords: Keywords = (),
    ) -> Tensor | None:
        """Run the whole Stream once, in its order: all its updates, if it has several.

        `inputs[mb]` is what the first stage takes, a tensor or a tuple of them, and `targets[mb]`
        what the loss of the last is taken against; ranks that hold neither may give empty ones.
        `keywords[mb]` is a mapping of what all stages are given by name, if anything.  Gradients
        are those of `scale` times the sum of all losses, or of an update's; it may be a 0-dim
        tensor on the rank's device, which the host does not read.  Returns the sum of all,
        unscaled, on the rank of the last stage, and None elsewhere; each of two such ranks sums up
        those taken there.

        Before the first step over a transport of streams, as NCCL, steps are run that are undone
        (`undone.undone`), with what this one is given, one instruction after the other: loading a
        kernel, allocating memory or connecting to a peer may wait for all that runs on a GPU, and
        beside a receive that waits for a peer it would wait for ever.  What modules, losses and
        their hooks keep elsewhere than in Parameters and buffers, as a count, is not undone.

        Raises ExecutionError that names the instruction.
        """
        batch = Batch(inputs, targets, scale, keywords)
        if not self.warm:
            self._warm_up(batch)
        return self._step(batch)

    def step_in_turn(
        self,
        inputs: Microbatches,
        targets: Microbatches,
        scale: float | Tensor = 1.0,
        keywords: Keywords = (),
    ) -> Tensor | None:
        """As `step`, over a transport of streams, but one instruction after the other, in an order
        that all ranks share: nothing overlaps, and nothing hangs, whoever waits for the device.

        All processes must call this.  Raises ModelError over another transport.
        """
        if self.in_turn is None:
            raise ModelError(
                "one instruction after the other is for messages on streams of their own",
                program=self.program.name,
            )
        with self.in_turn.one_by_one():
            return self._step(Batch(inputs, targets, scale, keywords), self._one_order)

    @cached_property
    def _one_order(self) -> list[int]:
        of = self.state.transport
        graph = Graph.of(self.program, of.model, blocks=of.blocks)
        return [*map(int, one_order(graph)[self.rank])]

    def _warm_up(self, batch: Batch) -> None:
        """Do whatever a step does at first use, in steps in turn that are undone."""
        self.state.expect(batch)
        record, self.record = self.record, False
        try:
            warm_up(self.state, self.step_in_turn, batch)
        finally:
            self.record = record
        self.warm = True

    def settle(self) -> None:
        """Validate the last update, where the program validates after: until then weights and the
        optimizer's state may be wrong.  What a step returns, `norm` and `finite` are right always.

        All processes must call this, after the same step.
        """
        if self.state.ahead is not None:
            self._expect_whole()
            self.state.transport.agree({"the step that is settled": str(self.draws.step)})
            self.state.ahead.settle()

    def whole(self) -> AbstractContextManager[None]:
        """Within this, between steps, every weight is whole where replicas keep parts (ZeRO), to be
        saved or loaded.  All processes must enter and leave it together, and write the same; it
        raises ModelError where they differ."""
        self._expect_whole()
        return whole(self.state)

    def _step(self, batch: Batch, order: Sequence[int] | None = None) -> Tensor | None:
        """A step in the order of the Stream, or another one; again where it was in vain."""
        try:
            total = self._once(batch, order)
            while self.is_in_vain():
                total = self._once(batch, order)
        except BaseException:  # an interrupt, too, must not leave modules what stands in
            self.state.fail(begun=self.under_way)
            raise
        return total

    def _once(self, batch: Batch, order: Sequence[int] | None) -> Tensor | None:
        self.begin(batch)
        with self.draws.kept(), torch.set_grad_enabled(self.program.trains):
            if order or self.record or self.profiled:
                for k in order or range(len(self.calls)):
                    self.call(k)
            else:
                self._run()
        return self.finish()

    def _run(self) -> None:
        """Every call in order, and nothing else."""
        self.under_way, at, clock = True, self.at, monotonic_ns
        try:
            for k, (wait, run) in enumerate(self.calls):
                at[AT], at[SINCE] = k, clock()
                if wait is not None:
                    wait()
                run()
        except Exception as error:
            raise self.state.failed(self.position, error) from error

    def begin(self, batch: Batch) -> None:
        """Make ready for a step; then every call is made once, in a legal order."""
        state = self.state
        self._expect_whole()
        state.unchanged.expect(self.program.name)
        self.state.expect(batch)
        self.profiled = self.warm and torch.autograd.profiler._is_profiler_enabled
        if state.ahead is not None and state.ahead.begin():
            noted = Noted(state, batch, self.unstepped)
            batch, state.ahead.put_back = noted.batch, noted.put_back
        self.at[AT] = 0
        state.begin(batch)

    def is_in_vain(self) -> bool:
        """Whether the step that has ended was run on wrong weights, on all ranks: these are right
        now, all else is as it was, and it must be run again."""
        ahead, self.under_way = self.state.ahead, True  # who fails here has failed in the step
        try:
            in_vain = ahead is not None and ahead.ended()
        except Exception as error:
            raise self.state.failed(self.position, error) from error
        self.under_way = False
        return in_vain

    def _expect_whole(self) -> None:
        """Raise ExecutionError after a step that has failed."""
        if self.under_way:
            raise ExecutionError(
                f"rank {self.rank} has failed in the step before, and left messages on their way",
                program=self.program.name,
                hint="make the executor and its transport anew",
            )

    @cached_property
    def _marks(self) -> list[str]:
        """The names of the ranges that instructions are under torch.profiler, by their index."""
        return marks_of(self.state.stream)

    def call(self, k: int) -> None:
        """Run the instruction at index k of the Stream; `step` has set whether gradients flow."""
        self.under_way, self.at[AT], self.at[SINCE] = True, k, monotonic_ns()
        wait, run = self.calls[k]
        stamps = self.stamps if self.record else None
        try:
            if wait is not None:
                wait()
            if stamps is not None:
                stamps.begins(k)
            if self.profiled:
                with record_function(self._marks[k]):
                    run()
            else:
                run()
            if stamps is not None:
                stamps.ends(k)
        except Exception as error:
            raise self.state.failed(self.position, error) from error

    def finish(self) -> Tensor | None:
        """End a step: everything that is still on its way out is waited for."""
        self.at[AT], self.at[SINCE] = len(self.calls), monotonic_ns()
        total, self.under_way = self.state.finish(), False
        if self.stamps is not None and self.record:
            self.stamps.close()
        return total
