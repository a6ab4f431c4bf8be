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
from schedir.runtime.boundaries.boundary import BoundaryByEdge, BoundaryLike
from schedir.runtime.boundaries.boundary_table import BoundaryTable, PerMicrobatchBoundary
from schedir.runtime.checkpoint_state import CheckpointState, build_checkpoint_state
from schedir.runtime.extra_programs import ExtraProgram, ProgramOrder, resolve_extra_programs
from schedir.runtime.model_checks.rank_consistency import check_rank_agreement
from schedir.runtime.offload.memory_tiers import MemoryTiers
from schedir.runtime.parameters.mixed_precision import LossScale, OptimizerLike
from schedir.runtime.parameters.tied_parameters import fingerprint_parameters
from schedir.runtime.program_runner import ProgramRunner
from schedir.runtime.rank_resources import Loss, RankResources, find_device
from schedir.runtime.rank_state import State
from schedir.runtime.step_inputs import Keywords, Microbatches, StepInputs
from schedir.runtime.warm_up import WARM_UP_STEPS as WARM_UP_STEPS
from schedir.transports.serialized_transport import SerializedTransport
from schedir.transports.transport import Transport

# ---------------------------------------------------------------- whole weights

# With ZeRO, the weights of a rank are sharded between steps.  This context gathers them.


@contextmanager
def gather_full_parameters(state: State) -> Iterator[None]:
    """Gather every parameter of the rank's stages, and shard them again at the end.

    Within this context parameters may be written to.  All processes must enter and leave it
    together, and write the same.  Raises ModelError if replicas have written different numbers.
    """
    weights = [
        stage.sharded_parameters
        for stage in state.stages.values()
        if stage.sharded_parameters is not None
    ]
    for one in weights:
        one.summon_full(state.transport.start_collective)
    try:
        yield
        if state.shard_spec.zero:
            # Compare in any case: a write to `.data` does not change a tensor's version.
            state.transport.check_agreement(_checksum_parameters(state))
    finally:
        for one in weights:
            one.write_back()


def _checksum_parameters(state: State) -> dict[str, str]:
    """Return checksums of the parameters, which replicas compare."""
    modules = {s: stage.module for s, stage in state.stages.items()}
    return {
        f"the numbers of {p.names[0]} in stage {s}, "
        f"slice {state.transport.tp_rank}": p.values_digest
        for s, own in fingerprint_parameters(modules).items()
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

    `tied_weights` says which parameters are copies of one weight:
    `schedir.find_tied_weights(stages)`, made of all the stages, the same in every process.  It may
    be left out where a process sees it, as its stages have one Parameter, and where modules name
    their copy, in an attribute `tied_weight`. Each copy keeps a gradient of its own; these are
    added once, in the order of stages, all copies get the sum, and norm and optimizer count the
    weight once.  Processes compare their parameters: trained ones of different stages that are
    equal, not constant and not tied are refused, unless
    `allow_identical_stages` says that stages may have been seeded alike.  Between steps a Parameter
    that stages share is in all of them; within a step all but the first compute with one that
    stands in.

    If the program validates "after", an update waits for no norm, and may be made again, with the
    step behind it (`runtime/parameters/optimistic_step.py`): `validate_last_update` before anybody
    looks at weights.

    With `zero` from 1 on (ZeRO, arXiv 1910.02054) each of `dp` replicas keeps a part of what they
    share.  Between steps a trained parameter is then the replica's piece of it, 1-dim, and so is
    its gradient; the optimizer, which must be elementwise, steps pieces.  `full_parameters` shows
    weights.

    `extra_programs` are programs that run on the same stages, each alone or with a boundary of its
    own where that is another: what evaluates between steps, what has another number of
    microbatches.  The transport is made for them, too, if it is told of its edges.

    Under tensor parallelism, a parameter of which each rank holds a slice has an attribute
    `shard_dim`, the dimension along which it is cut; others are held whole by all, and the global
    norm counts them once.  `parameter_copies` is an InProcessExecutor's, in which ranks share
    Parameters, and so is `other_rank_stages`: the stages of its other ranks, which may have the
    same buffers.

    What is trained is settled when the executor is made.  A step after a change to that, by
    `requires_grad_` or by a new Parameter, is refused.

    Whatever modules draw from torch's default generators is decided by `seed`, the step, the
    microbatch and the stage, as `schedir.runtime.autograd.random_streams` says; after a step the
    generators are as they were before it.  With None for a seed modules draw as they come.

    With `accumulate_grads`, a step adds to the gradients that there are, as autograd does, and
    leaves the rest to others: no optimizer, norm or sum over replicas, and nothing is judged to be
    finite.

    What a program spills to the disk goes into a file in `spill_dir` that has no name: nothing is
    left of it, however the process ends.  It is made as long as is needed in the first step, so
    that a disk that is full is so then.  Of a folder that is in memory it warns.

    With `record_timestamps`, `stamps` notes when each instruction begins and ends; the attribute of
    that name may be turned off and on between steps.  Under torch.profiler, an instruction is a
    range that says which it is, in torch's words where it has any (`PP:0F3`, `PP:1REDUCE_GRAD`,
    `PP:step`).

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
        boundary: BoundaryLike | BoundaryByEdge | PerMicrobatchBoundary | BoundaryTable,
        optimizer: OptimizerLike | None = None,
        max_norm: float | None = None,
        loss_scale: LossScale | None = None,
        seed: int | None = 0,
        tied_weights: TiedWeights | None = None,
        allow_identical_stages: bool = False,
        extra_programs: Sequence[ExtraProgram] = (),
        parameter_copies: Mapping[nn.Parameter, nn.Parameter] = MappingProxyType({}),
        other_rank_stages: Sequence[nn.Module] = (),
        accumulate_grads: bool = False,
        record_timestamps: bool = True,
        debug: bool = False,
        spill_dir: str | Path | None = None,
    ) -> None:
        program = arguments.require_program(program)
        passing = BoundaryTable.from_boundary(boundary, program)
        beside = resolve_extra_programs(extra_programs, program, passing)
        every = [] if isinstance(stages, Mapping) else [*enumerate(stages)]
        stages = arguments.require_stages(stages, program, arguments.require_rank(rank, program))
        other_rank_stages = [
            *other_rank_stages,
            *(m for s, m in every if s not in stages and isinstance(m, nn.Module)),
        ]
        arguments.require_loss(loss), arguments.require_optimizer(optimizer)
        max_norm, seed = (
            arguments.require_max_norm(max_norm, program),
            None if seed is None else arguments.require_seed(seed),
        )
        allow_identical_stages, accumulate_grads, record_timestamps = (
            require_bool(allow_identical_stages, "allow_identical_stages"),
            require_bool(accumulate_grads, "accumulate_grads"),
            require_bool(record_timestamps, "record_timestamps"),
        )
        debug = require_bool(debug, "debug")
        transport, loss_scale = (
            arguments.require_transport(transport),
            arguments.require_loss_scale(loss_scale),
        )
        programs = [program, *(other for other, _ in beside)]
        tiers = MemoryTiers(
            find_device(stages), rank, programs, arguments.require_spill_dir(spill_dir)
        )
        weights = check_rank_agreement(
            program, rank, stages, transport, passing,
            optimizer, max_norm, loss_scale, seed, tied_weights,
            allow_identical_stages=allow_identical_stages, accumulate_grads=accumulate_grads,
            extra_programs=beside,
        )  # fmt: skip
        held = RankResources(
            program, rank, stages,
            SerializedTransport(transport) if transport.uses_static_buffers else transport,
            loss, optimizer, max_norm, loss_scale, seed, weights, parameter_copies,
            other_rank_stages, accumulate_grads, debug,
            tiers,
        )  # fmt: skip
        held.allocate_buffers([(program, passing), *beside])
        super().__init__(program, held, passing, 0, record_timestamps=record_timestamps)
        # Of the programs that it runs each by its digest; the first is the executor itself.
        self.runners: dict[str, ProgramRunner] = {program.digest: self}
        for number, (other, passes) in enumerate(beside, 1):
            running = self.runners[other.digest] = ProgramRunner(
                other, held, passes, number, record_timestamps=False
            )
            running.progress = self.progress
        self.program_order = ProgramOrder(programs, rank, transport)
        self.current_runner: ProgramRunner = self  # what runs, or ran last
        held.shard_parameters()

    def step(
        self,
        inputs: Microbatches,
        targets: Microbatches,
        grad_scale: float | Tensor = 1.0,
        keywords: Keywords = (),
        *,
        program: Program | None = None,
    ) -> Tensor | None:
        """Run the whole Stream once, in its order: all its updates, if it has several.  That of the
        first program, or of `program`, another one that trains.

        `inputs[mb]` is what the first stage takes, a tensor or a tuple of them, and `targets[mb]`
        what the loss of the last is taken against; ranks that hold neither may give empty ones.
        `keywords[mb]` is a mapping of what all stages are given by name, if anything.  Gradients
        are those of `grad_scale` times the sum of all losses, or of an update's; it may be a 0-dim
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
        running = self if program is None else self.find_runner(program, has_backward=True)
        self._switch_program(running)
        return running.run_step(StepInputs(inputs, targets, grad_scale, keywords))

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
        running = self.find_runner(program, has_backward=False)
        self.validate_last_update()
        self._switch_program(running)
        return running.run_evaluation(StepInputs(inputs, targets, 1.0, keywords))

    def find_runner(self, program: Program | None, *, has_backward: bool) -> ProgramRunner:
        """What runs a program that trains or does not, the only one of its kind unless told.

        Raises ModelError for one that the executor was not made with.
        """
        found = [
            one
            for one in self.runners.values()
            if one.program.has_backward == has_backward
            if program is None or one.program.digest == program.digest
        ]
        if len(found) == 1:
            return found[0]
        kind = "trains" if has_backward else "does not train"
        names = ", ".join(one.program.name for one in self.runners.values())
        what = f"program that {kind}" if program is None else f"{program.name} that {kind}"
        raise ModelError(
            f"the executor was made with {names}: of these {len(found) or 'none'} "
            f"{'are' if found else 'is'} a {what}",
            program=self.program.name,
            hint="program=..." if found else "Executor(..., extra_programs=[program])",
        )

    def _switch_program(self, runner: ProgramRunner) -> None:
        """Note what runs next, as all processes must."""
        self._require_no_failed_step()
        self.program_order.start_run(runner.state.program_number)
        self.current_runner = runner

    def validate_last_update(self) -> None:
        """Validate the last update, where the program validates after: until then weights and the
        optimizer's state may be wrong.  What a step returns, `norm` and `finite` are right always.

        All processes must call this, after the same step.
        """
        if self.state.optimistic_step is not None:
            self._require_no_failed_step()
            self.state.transport.check_agreement(
                {"the step that is settled": str(self.random_streams.step)}
            )
            self.state.optimistic_step.finish_validation()

    def checkpoint_state(self) -> CheckpointState:
        """What `schedir.checkpoints` saves and loads."""
        return build_checkpoint_state([self.state], self.validate_last_update)

    def full_parameters(self) -> AbstractContextManager[None]:
        """Within this, between steps, every weight is whole where replicas keep parts (ZeRO), to be
        saved or loaded.  All processes must enter and leave it together, and write the same; it
        raises ModelError where they differ."""
        self._require_no_failed_step()
        return gather_full_parameters(self.state)
