"""Executor: run the Stream of one rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import MappingProxyType

from torch import Tensor, nn

from schedir.errors import ModelError, require_bool
from schedir.ir.pipeline.tied_weights import TiedWeights
from schedir.ir.program import Program
from schedir.runtime import arguments
from schedir.runtime.boundaries.boundary import Edges, Given
from schedir.runtime.boundaries.boundary_table import BoundaryTable, PerMicrobatchBoundary
from schedir.runtime.checkpoint_state import CheckpointState, kept_of
from schedir.runtime.extra_programs import Beside, ProgramOrder, beside_of
from schedir.runtime.model_checks.rank_consistency import agreed
from schedir.runtime.offload.memory_tiers import MemoryTiers
from schedir.runtime.parameters.mixed_precision import LossScale, OptimizerLike
from schedir.runtime.parameters.tied_parameters import prints
from schedir.runtime.program_runner import ProgramRunner
from schedir.runtime.rank_resources import Loss, RankResources, device_of
from schedir.runtime.rank_state import State
from schedir.runtime.step_inputs import Keywords, Microbatches, StepInputs
from schedir.runtime.warm_up import WARM as WARM
from schedir.transports.serialized_transport import SerializedTransport
from schedir.transports.transport import Transport

# ---------------------------------------------------------------- whole weights

# With ZeRO, the weights of a rank are sharded between steps.  This context gathers them.


@contextmanager
def whole(state: State) -> Iterator[None]:
    """Gather every parameter of the rank's stages, and shard them again at the end.

    Within this context parameters may be written to.  All processes must enter and leave it
    together, and write the same.  Raises ModelError if replicas have written different numbers.
    """
    weights = [stage.weights for stage in state.stages.values() if stage.weights is not None]
    for one in weights:
        one.show(state.transport.collective)
    try:
        yield
        if state.share.zero:
            # Compare in any case: a write to `.data` does not change a tensor's version.
            state.transport.agree(_numbers(state))
    finally:
        for one in weights:
            one.take()


def _numbers(state: State) -> dict[str, str]:
    """Return checksums of the parameters, which replicas compare."""
    modules = {s: stage.module for s, stage in state.stages.items()}
    return {
        f"the numbers of {p.names[0]} in stage {s}, slice {state.transport.tp_rank}": p.values
        for s, own in prints(modules).items()
        for p in own
    }


class Executor(ProgramRunner):
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
    `infer_boundaries` finds it for a microbatch.  A tensor with a gradient depends on what
    is trained, or on what came in with one; one without is passed on detached.  What a stage does
    not use has a gradient of zeros.

    An update is made only where it is finite, losses and gradients; else weights and the state of
    the optimizer stay as they are, but not buffers that a forward writes, as running statistics.
    `finite`, bool of shape (updates,) on the rank's device, says it of each update of the last
    step.  If the program clips, all ranks judge by the norm and come to the same; if not, each by
    its own gradients, and others may step: then copies of one weight, tied or of tensor-parallel
    ranks, are no longer the same.  `compile(..., clip_grad_norm=True)` with a `max_norm` of
    infinity clips nothing.  torch's own fused optimizers are told on the device; for any other, and
    for one with hooks on its step, the host reads it, and on a GPU waits.

    `tied` says which parameters are copies of one weight: `schedir.find_tied_weights(stages)`, made
    of all the stages, the same in every process.  It may be left out where a process sees it, as
    its stages have one Parameter, and where modules name their copy, in an attribute `tied_weight`.
    Each copy keeps a gradient of its own; these are added once, in the order of stages, all copies
    get the sum, and norm and optimizer count the weight once.  Processes compare their parameters:
    trained ones of different stages that are equal, not constant and not tied are refused, unless
    `alike` says that stages may have been seeded alike.  Between steps a Parameter that stages
    share is in all of them; within a step all but the first compute with one that stands in.

    If the program validates "after", an update waits for no norm, and may be made again, with the
    step behind it (`runtime/parameters/optimistic_step.py`): `settle` before anybody looks at
    weights.

    With `zero` from 1 on (ZeRO, arXiv 1910.02054) each of `dp` replicas keeps a part of what they
    share.  Between steps a trained parameter is then the replica's piece of it, 1-dim, and so is
    its gradient; the optimizer, which must be elementwise, steps pieces.  `whole` shows weights.

    `more` are programs that run on the same stages, each alone or with a boundary of its own where
    that is another: what evaluates between steps, what has another number of microbatches.  The
    transport is made for them, too, if it is told of its edges.

    Under tensor parallelism, a parameter of which each rank holds a slice has an attribute
    `shard_dim`, the dimension along which it is cut; others are held whole by all, and the global
    norm counts them once.  `copies` is an InProcessExecutor's, in which ranks share Parameters, and
    so is `others`: the stages of its other ranks, which may have the same buffers.

    What is trained is settled when the executor is made.  A step after a change to that, by
    `requires_grad_` or by a new Parameter, is refused.

    Whatever modules draw from torch's default generators is decided by `seed`, the step, the
    microbatch and the stage, as `schedir.runtime.autograd.random_streams` says; after a step the
    generators are as they were before it.  With None for a seed modules draw as they come.

    With `adds`, a step adds to the gradients that there are, as autograd does, and leaves the rest
    to others: no optimizer, norm or sum over replicas, and nothing is judged to be finite.

    What a program spills to the disk goes into a file in `folder` that has no name: nothing is left
    of it, however the process ends.  It is made as long as is needed in the first step, so that a
    disk that is full is so then.  Of a folder that is in memory it warns.

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
    >>> from schedir.runtime import Executor, GlooTransport
    >>> distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    >>> shape = schedir.PipelineShape(ranks=1, microbatches=4, stages_per_rank=2)
    >>> program = schedir.compile(schedir.schedules.interleaved, shape)
    >>> stages, loss = [nn.Linear(8, 8), nn.Linear(8, 1)], nn.functional.mse_loss
    >>> sgd = torch.optim.SGD([p for stage in stages for p in stage.parameters()], lr=0.01)
    >>> how = dict(loss=loss, boundary=(2, 8), optimizer=sgd)
    >>> rank = Executor(program, 0, stages, GlooTransport(program),
    ...     **how)  # of several, each makes its own
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
        boundary: Given | Edges | PerMicrobatchBoundary | BoundaryTable,
        optimizer: OptimizerLike | None = None,
        max_norm: float | None = None,
        loss_scale: LossScale | None = None,
        seed: int | None = 0,
        tied: TiedWeights | None = None,
        alike: bool = False,
        more: Sequence[Beside] = (),
        copies: Mapping[nn.Parameter, nn.Parameter] = MappingProxyType({}),
        others: Sequence[nn.Module] = (),
        adds: bool = False,
        record: bool = True,
        debug: bool = False,
        folder: str | Path | None = None,
    ) -> None:
        program = arguments.program_of(program)
        passing = BoundaryTable.of(boundary, program)
        beside = beside_of(more, program, passing)
        every = [] if isinstance(stages, Mapping) else [*enumerate(stages)]
        stages = arguments.stages_of(stages, program, arguments.rank_of(rank, program))
        others = [*others, *(m for s, m in every if s not in stages and isinstance(m, nn.Module))]
        arguments.loss_of(loss), arguments.optimizer_of(optimizer)
        max_norm, seed = (
            arguments.max_norm_of(max_norm, program),
            None if seed is None else arguments.seed_of(seed),
        )
        alike, adds, record = (
            require_bool(alike, "alike"),
            require_bool(adds, "adds"),
            require_bool(record, "record"),
        )
        debug = require_bool(debug, "debug")
        transport, loss_scale = (
            arguments.transport_of(transport),
            arguments.loss_scale_of(loss_scale),
        )
        programs = [program, *(other for other, _ in beside)]
        tiers = MemoryTiers(device_of(stages), rank, programs, arguments.folder_of(folder))
        weights = agreed(
            program, rank, stages, transport, passing,
            optimizer, max_norm, loss_scale, seed, tied, alike=alike, adds=adds,
            more=beside,
        )  # fmt: skip
        held = RankResources(
            program, rank, stages,
            SerializedTransport(transport) if transport.static else transport,
            loss, optimizer, max_norm, loss_scale, seed, weights, copies, others, adds, debug,
            tiers,
        )  # fmt: skip
        held.make_room([(program, passing), *beside])
        super().__init__(program, held, passing, 0, record=record)
        # Of the programs that it runs each by its digest; the first is the executor itself.
        self.running: dict[str, ProgramRunner] = {program.digest: self}
        for number, (other, passes) in enumerate(beside, 1):
            running = self.running[other.digest] = ProgramRunner(
                other, held, passes, number, record=False
            )
            running.at = self.at
        self.order = ProgramOrder(programs, rank, transport)
        self.now: ProgramRunner = self  # what runs, or ran last
        held.cut()

    def step(
        self,
        inputs: Microbatches,
        targets: Microbatches,
        scale: float | Tensor = 1.0,
        keywords: Keywords = (),
        *,
        program: Program | None = None,
    ) -> Tensor | None:
        """Run the whole Stream once, in its order: all its updates, if it has several.  That of the
        first program, or of `program`, another one that trains.

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
        running = self if program is None else self.on(program, trains=True)
        self._next(running)
        return running.run(StepInputs(inputs, targets, scale, keywords))

    def evaluate(
        self,
        inputs: Microbatches,
        targets: Microbatches,
        keywords: Keywords = (),
        *,
        program: Program | None = None,
    ) -> Tensor | None:
        """Run the forwards of a program between two steps, with modules as `eval()` has them;
        returns the sum of losses as `step`.  `program` is the only one that does not train, unless
        told.

        Nothing of it is left: no gradient is touched, buffers and modes are put back, no number is
        drawn that a step would draw, and `draws.step` stays.  Raises ModelError where a forward
        writes to a Parameter, and ExecutionError as `step`.
        """
        running = self.on(program, trains=False)
        self.settle()
        self._next(running)
        return running.look(StepInputs(inputs, targets, 1.0, keywords))

    def on(self, program: Program | None, *, trains: bool) -> ProgramRunner:
        """What runs a program that trains or does not, the only one of its kind unless told.

        Raises ModelError for one that the executor was not made with.
        """
        found = [
            one
            for one in self.running.values()
            if one.program.trains == trains
            if program is None or one.program.digest == program.digest
        ]
        if len(found) == 1:
            return found[0]
        kind = "trains" if trains else "does not train"
        names = ", ".join(one.program.name for one in self.running.values())
        what = f"program that {kind}" if program is None else f"{program.name} that {kind}"
        raise ModelError(
            f"the executor was made with {names}: of these {len(found) or 'none'} "
            f"{'are' if found else 'is'} a {what}",
            program=self.program.name,
            hint="program=..." if found else "Executor(..., more=[program])",
        )

    def _next(self, running: ProgramRunner) -> None:
        """Note what runs next, as all processes must."""
        self._expect_whole()
        self.order.run(running.state.number)
        self.now = running

    def settle(self) -> None:
        """Validate the last update, where the program validates after: until then weights and the
        optimizer's state may be wrong.  What a step returns, `norm` and `finite` are right always.

        All processes must call this, after the same step.
        """
        if self.state.ahead is not None:
            self._expect_whole()
            self.state.transport.agree({"the step that is settled": str(self.draws.step)})
            self.state.ahead.settle()

    def kept(self) -> CheckpointState:
        """What `schedir.checkpoints` saves and loads."""
        return kept_of([self.state], self.settle)

    def whole(self) -> AbstractContextManager[None]:
        """Within this, between steps, every weight is whole where replicas keep parts (ZeRO), to be
        saved or loaded.  All processes must enter and leave it together, and write the same; it
        raises ModelError where they differ."""
        self._expect_whole()
        return whole(self.state)
