"""RankModel: the model of a rank, and all its checks before the first step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from schedir.errors import ModelError
from schedir.ir.pipeline.tied_weights import TiedWeights
from schedir.ir.program import Program
from schedir.runtime.boundaries.microbatch_boundaries import BoundaryTable
from schedir.runtime.in_process_copies import find_shared_parameters
from schedir.runtime.model_checks.memory_overlap import require_copyable, require_rank_local_memory
from schedir.runtime.model_checks.optimizer_requirements import (
    require_gradient_options,
    require_placeable_state,
    require_steppable,
)
from schedir.runtime.model_checks.rank_consistency import compare_processes
from schedir.runtime.model_checks.sharding_requirements import (
    require_elementwise,
    require_shardable,
)
from schedir.runtime.model_checks.stage_requirements import (
    find_device,
    require_matching_experts,
    require_matching_stages,
    require_matching_transport,
)
from schedir.runtime.model_checks.tied_weight_requirements import (
    describe_places,
    list_local_tied_weights,
    require_no_max_norm,
)
from schedir.runtime.parameters.optimizer_inspection import OptimizerLike
from schedir.runtime.parameters.parameter_copies import require_no_node_hooks
from schedir.runtime.parameters.tied_parameters import TiedWeight
from schedir.runtime.rank_resources import RankOptions
from schedir.transports.transport import Transport
from schedir.verify.check import check


@dataclass(frozen=True)
class ModelToCheck:
    """The stages of a rank, with the programs, the transport and the options of the executor.

    Args:
        programs: The programs of the executor, with their boundaries. If any program trains, the
            first program trains.
        rank: The pipeline rank.
        stages: The stages of the rank, by number.
        transport: The transport of the rank.
        optimizer: The optimizer, or None.
        options: The options of the rank.
        tied_weights: The tied weights that the user passed, or None.
    """

    programs: Sequence[tuple[Program, BoundaryTable]]
    rank: int
    stages: Mapping[int, nn.Module]
    transport: Transport
    optimizer: OptimizerLike | None
    options: RankOptions
    tied_weights: TiedWeights | None

    def check(self) -> list[TiedWeight]:
        """Compare all processes, and check that the programs train the model correctly.

        All processes must call this method. The first check that fails raises the error. A
        ModelError has the name of the program. Its `fields` contain the wrong argument of
        `Executor`, except in errors from the comparison of processes.

        Returns:
            The tied weights with copies on this rank. Without a backward there are none.

        Raises:
            ModelError: The processes differ, or the model does not fit the programs.
            SchedirError: `schedir.check` finds an error in a program, under the progress model of
                the transport.
        """
        (program, boundaries), *extra_programs = self.programs
        stages, transport, optimizer = self.stages, self.transport, self.optimizer
        gradients = self.options.gradients
        fingerprints = compare_processes(self.programs, stages, transport, optimizer, self.options)
        all_programs = [program for program, _ in self.programs]
        for checked_program in all_programs:
            check(
                checked_program, transport.progress_model, blocking_hosts=transport.blocking_hosts
            )
        for extra_program, extra_boundaries in extra_programs:
            with _add_error_context(extra_program, "extra_programs"):
                extra_boundaries.require_program_fit(extra_program)
        with _add_error_context(program, "stages"):
            require_matching_stages(program, self.rank, stages)
            find_device(stages)
        with _add_error_context(program, "transport"):
            require_matching_transport(program, transport)
        with _add_error_context(program, "stages"):
            require_matching_experts(program, transport, stages)
        with _add_error_context(program, "boundary"):
            boundaries.require_program_fit(program)
        with _add_error_context(program, "stages"):
            require_shardable(program, stages, optimizer)
        with _add_error_context(program, "optimizer"):
            require_elementwise(program, optimizer)
            require_steppable(program, stages, optimizer)
            copies = self.options.parameter_copies
            require_placeable_state(all_programs, stages, optimizer, copies)
        with _add_error_context(program, "gradients"):
            require_gradient_options(program, gradients, optimizer, all_programs[1:])
        if not program.has_backward:
            return []
        with _add_error_context(program, "tied_weights"):
            weights = list_local_tied_weights(
                program, stages, fingerprints, self.tied_weights,
                allow_identical_stages=self.options.execution.allow_identical_stages,
            )  # fmt: skip
        with _add_error_context(program, "stages"):
            require_no_max_norm(program, stages, weights)
        return weights


def check_virtual_ranks(program: Program, stages: Sequence[nn.Module]) -> None:
    """Check that ranks in one process give the same results as ranks in separate processes.

    Args:
        program: The program.
        stages: All stages of the model, in order.

    Raises:
        ModelError: Tensors of several ranks share memory, or tensors of a stage with stage replicas
            share memory. Or ranks share a Parameter that ZeRO would shard, or that has hooks on its
            autograd node.
    """
    stages_by_number = dict(enumerate(stages))
    ranks = program.shape.first_rank_per_stage.tolist()
    with _add_error_context(program, "stages"):
        if program.has_backward:
            require_rank_local_memory(stages_by_number, ranks, program.name)
            for s, module in stages_by_number.items() if program.shape.placement_rows > 1 else ():
                require_copyable(module, s, program.name)
        for p, locations in find_shared_parameters(program, stages).items():
            description = describe_places(locations.values())
            if program.zero:
                raise ModelError(
                    f"{description} are one Parameter on {len(locations)} ranks, but ZeRO level "
                    f"{program.zero} would shard this Parameter on each of these ranks",
                    hint="ties = schedir.find_tied_weights(stages), then stages = [deepcopy(stage) "
                    "for stage in stages] and tied_weights=ties; or zero=0",
                )
            if program.has_backward:
                require_no_node_hooks(p, description)


@contextmanager
def _add_error_context(program: Program, field: str) -> Iterator[None]:
    """Add the program and the argument of `Executor` to errors that do not have them."""
    try:
        yield
    except ModelError as error:
        error.program = error.program or program.name
        error.fields = error.fields or (field,)
        raise
