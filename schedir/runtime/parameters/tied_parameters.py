"""Tied weights of a rank: copies in several stages, and one sum of their gradients.

The gradients of the copies are added in the order of stages, and every copy gets the sum. Copies
may be on one rank or on several. Several stages of a rank may have the same Parameter. Then the
first stage computes with the Parameter itself, and the others with substitutes in the same memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.pipeline.tied_weights import (
    find_sharing_ranks,
    is_tied_across_ranks,
)
from schedir.ir.program import Program
from schedir.runtime.parameters.parameter_copies import make_parameter_like
from schedir.transports.transport import ChainedWork, Transport, Work


@dataclass
class TiedWeight:
    """A tied weight with at least one copy on this rank.

    Args:
        stages: All stages that share the weight.
        local_copies: Stage of this rank -> its copy of the weight.
    """

    stages: tuple[int, ...]
    local_copies: dict[int, nn.Parameter]


def _has_separate_copies(weight: TiedWeight, shape: PipelineShape) -> bool:
    """Return whether copies of a weight have separate memory, so that each needs an update."""
    return (
        is_tied_across_ranks(weight.stages, shape)
        or len({p.data_ptr() for p in weight.local_copies.values()}) > 1
    )


class LocalTies:
    """The substitutes of a stage for Parameters that it shares with other stages of the process.

    Stages may share modules, so each computation first installs the substitutes of its stage.
    Between steps the modules have the original Parameters.

    Args:
        module: The stage.
        substitutes: Shared Parameter -> its substitute in this stage.
    """

    def __init__(self, module: nn.Module, substitutes: Mapping[nn.Parameter, nn.Parameter]) -> None:
        self.substitutions: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = [
            (owner, name, p, substitutes[p])
            for owner in module.modules()
            for name, p in owner.named_parameters(recurse=False, remove_duplicate=False)
            if p in substitutes
        ]

    def install_substitutes(self) -> None:
        """Set the substitutes in the module."""
        for owner, name, _, substitute in self.substitutions:
            setattr(owner, name, substitute)

    def restore(self) -> None:
        """Put the original Parameters back into the module."""
        for owner, name, original, _ in self.substitutions:
            setattr(owner, name, original)


class RankTies:
    """The tied weights of a rank, and the Parameters of the rank that share memory.

    Args:
        weights: The tied weights with copies on the rank. The constructor sets substitutes in the
            `local_copies` of these weights.
        parameter_copies: Parameter that several ranks of an `InProcessExecutor` share -> the copy
            that this rank uses.
        program: The first program of the rank.
        keeps_gradients: True if a step adds gradients to existing ones.

    Attributes:
        substitutes: Stage -> shared Parameter -> its substitute in this stage.
        aliases: Substitute -> the Parameter of the rank whose memory it uses.
        has_separate_copies: True if at least one tied weight has copies in separate memory.
    """

    def __init__(
        self,
        weights: Sequence[TiedWeight],
        parameter_copies: Mapping[nn.Parameter, nn.Parameter],
        program: Program,
        *,
        keeps_gradients: bool,
    ) -> None:
        self.weights = weights
        self.parameter_copies = parameter_copies
        self.is_sharded: bool = program.zero > 0
        self.keeps_gradients = keeps_gradients
        substitutes, aliases = _make_substitutes(weights, parameter_copies)
        self.substitutes: dict[int, dict[nn.Parameter, nn.Parameter]] = substitutes
        self.aliases: dict[nn.Parameter, nn.Parameter] = aliases
        self.has_separate_copies: bool = any(
            _has_separate_copies(w, program.shape) for w in weights
        )

    def list_local_copies(self, stage: int) -> list[nn.Parameter]:
        """Return the Parameters of a stage that are copies of tied weights.

        Args:
            stage: The number of the stage.
        """
        return [w.local_copies[stage] for w in self.weights if stage in w.local_copies]

    def copy_shared_parameters(self) -> None:
        """Copy the values of Parameters that several ranks share to the copies of this rank."""
        for shared, copy in self.parameter_copies.items():
            if copy is not shared:
                copy.detach().copy_(shared.detach())

    def begin_update(self) -> None:
        """Let each alias use the memory of its Parameter again, if the caller replaced `data`."""
        for alias, original in self.aliases.items():
            if not self.is_sharded and alias.data_ptr() != original.data_ptr():
                alias.data = original.data
            if self.keeps_gradients:
                alias.grad = None


def _make_substitutes(
    weights: Sequence[TiedWeight], copies: Mapping[nn.Parameter, nn.Parameter]
) -> tuple[dict[int, dict[nn.Parameter, nn.Parameter]], dict[nn.Parameter, nn.Parameter]]:
    """Create the substitutes for Parameters that several stages of a process have.

    The rank's first stage with the Parameter uses the Parameter itself, or the rank's copy of it.
    Each later stage gets another Parameter in the same memory, with a separate gradient.

    Args:
        weights: The tied weights of the rank. The function sets substitutes in the `local_copies`
            of these weights.
        copies: Parameter that several ranks of the process share -> the copy of this rank.

    Returns:
        `RankTies.substitutes` and `RankTies.aliases`.
    """
    substitutes: dict[int, dict[nn.Parameter, nn.Parameter]] = {}
    aliases: dict[nn.Parameter, nn.Parameter] = {}
    for weight in weights:
        uses = Counter(weight.local_copies.values())
        seen_parameters: set[nn.Parameter] = set()
        for s, p in weight.local_copies.items():
            if uses[p] == 1 and p not in copies:
                continue
            substitute = copies.get(p, p)
            if p in seen_parameters:
                alias = make_parameter_like(p, substitute.detach())
                aliases[alias] = substitute
                substitute = alias
            substitutes.setdefault(s, {})[p] = substitute
            seen_parameters.add(p)
        weight.local_copies |= {
            s: substitutes[s][p]
            for s, p in weight.local_copies.items()
            if p in substitutes.get(s, ())
        }
    return substitutes, aliases


def sum_into_copies(*sums: Tensor, targets: Sequence[Tensor] | None = None) -> None:
    """Add tensors in their order, and copy the sum into each target.

    The first tensor is overwritten by the sum.

    Args:
        *sums: The tensors to add.
        targets: The tensors that get the sum. By default these are `sums`.
    """
    total, *others = sums
    for other in others:
        total.add_(other)
    for grad in sums if targets is None else targets:
        if grad is not total:
            grad.copy_(total)


def make_tie_reducer(
    weight: TiedWeight,
    shape: PipelineShape,
    rank: int,
    transport: Transport,
    works: list[Work],
    get_grad: Callable[[int], Tensor],
) -> Callable[[], None]:
    """Return a function that starts the sum of a tied weight's gradients.

    Gradients are added in the order of stages, and every copy gets the sum.

    Args:
        weight: The tied weight.
        shape: The pipeline shape.
        rank: The pipeline rank.
        transport: The transport of the rank.
        works: A list to which the function appends the Work, if the copies are on several ranks.
        get_grad: Returns the gradient of a local stage's copy, or this replica's shard of it.
    """
    local_stages, ranks = [*weight.local_copies], find_sharing_ranks(weight.stages, shape)
    if not is_tied_across_ranks(weight.stages, shape):
        return lambda: sum_into_copies(*map(get_grad, local_stages))
    if (
        len(ranks) == len(weight.stages) == 2
    ):  # in place, because the order of two summands does not matter
        (stage,) = local_stages

        def start_in_place() -> None:
            grad = get_grad(stage)
            works.append(transport.start_collective("all_reduce", ranks, grad, grad))

        return start_in_place

    def start_by_rows() -> None:
        grads = {s: get_grad(s) for s in local_stages}
        first_grad = next(iter(grads.values()))
        # One row for each stage. The first rank with the stage fills the row, and the all-reduce
        # gives all ranks the rows of all stages.
        rows = first_grad.new_zeros((len(weight.stages), *first_grad.shape))
        for row, s in zip(rows, weight.stages, strict=True):
            if s in local_stages and shape.first_rank_per_stage[s] == rank:
                row.copy_(grads[s])
        work = transport.start_collective("all_reduce", ranks, rows, rows)
        works.append(ChainedWork(work, partial(sum_into_copies, *rows, targets=[*grads.values()])))

    return start_by_rows
