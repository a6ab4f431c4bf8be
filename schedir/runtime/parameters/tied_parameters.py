"""Tied weights of a rank: copies in several stages, with one gradient sum each.

The gradients of the copies are added once, in the order of stages, and every copy gets the sum.
Copies may be on several ranks or on one. Two stages of one rank may have the same Parameter. Then
the first stage computes with the Parameter itself, and the others with substitutes in the same
memory.
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
    """A tied weight of a rank.

    Args:
        stages: All stages that share the weight.
        local_copies: The Parameters of this rank's stages, by stage.
    """

    stages: tuple[int, ...]
    local_copies: dict[int, nn.Parameter]


def _has_separate_copies(weight: TiedWeight, shape: PipelineShape) -> bool:
    """Return whether the copies of a weight do not share memory.

    Each copy is then stepped separately.

    Args:
        weight: The tied weight.
        shape: The pipeline shape.
    """
    return (
        is_tied_across_ranks(weight.stages, shape)
        or len({p.data_ptr() for p in weight.local_copies.values()}) > 1
    )


class LocalTies:
    """The substitutes of a stage for Parameters that other stages of the process have, too.

    Stages may share modules, so each computation installs its own substitutes. Between steps the
    modules have the original Parameters.

    Args:
        module: The stage.
        substitutes: The substitute of each Parameter.
    """

    def __init__(self, module: nn.Module, substitutes: Mapping[nn.Parameter, nn.Parameter]) -> None:
        self.substitutions: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = [
            (owner, name, p, substitutes[p])
            for owner in module.modules()
            for name, p in owner.named_parameters(recurse=False, remove_duplicate=False)
            if p in substitutes
        ]

    def install_substitutes(self) -> None:
        """Let the module compute with its substitutes."""
        for owner, name, _, substitute in self.substitutions:
            setattr(owner, name, substitute)

    def restore(self) -> None:
        """Give the module the original Parameters again."""
        for owner, name, original, _ in self.substitutions:
            setattr(owner, name, original)


class RankTies:
    """The tied weights of a rank, and its Parameters that share memory with others.

    Args:
        weights: The tied weights with copies on the rank. They get the substitutes.
        parameter_copies: The Parameter with which this rank computes, by each Parameter that
            virtual ranks of the process share.
        program: The first program of the rank.
        keeps_gradients: True if gradients are added to existing ones.

    Attributes:
        substitutes: By stage, the substitute of each Parameter that several stages have.
        aliases: For each Parameter in the memory of another one, that other one.
        has_separate_copies: True if the copies of a weight do not share memory.
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
            stage: The stage.
        """
        return [w.local_copies[stage] for w in self.weights if stage in w.local_copies]

    def copy_shared_parameters(self) -> None:
        """Copy the values of shared Parameters to the rank's own copies."""
        for shared, copy in self.parameter_copies.items():
            if copy is not shared:
                copy.detach().copy_(shared.detach())

    def begin_update(self) -> None:
        """Let aliases use the memory of the other Parameter: the caller may have replaced it."""
        for alias, one in self.aliases.items():
            if not self.is_sharded and alias.data_ptr() != one.data_ptr():
                alias.data = one.data
            if self.keeps_gradients:
                alias.grad = None


def _make_substitutes(
    weights: Sequence[TiedWeight], copies: Mapping[nn.Parameter, nn.Parameter]
) -> tuple[dict[int, dict[nn.Parameter, nn.Parameter]], dict[nn.Parameter, nn.Parameter]]:
    """Create the substitutes for Parameters that several stages of a process have.

    The first of a rank's stages computes with the Parameter or the rank's copy of it. Each other
    stage gets a Parameter in the same memory, with a gradient of its own. The tied weights then
    contain the substitutes.

    Args:
        weights: The tied weights of the rank, which are changed.
        copies: The rank's own copies of Parameters that other ranks of the process have, too.

    Returns:
        By stage, the substitute of each shared Parameter. And for each Parameter in the memory of
        another one, that other one.
    """
    substitutes: dict[int, dict[nn.Parameter, nn.Parameter]] = {}
    aliases: dict[nn.Parameter, nn.Parameter] = {}
    for weight in weights:
        uses = Counter(weight.local_copies.values())
        seen: set[nn.Parameter] = set()
        for s, p in weight.local_copies.items():
            if uses[p] == 1 and p not in copies:
                continue
            substitute = copies.get(p, p)
            if p in seen:
                alias = make_parameter_like(p, substitute.detach())
                aliases[alias] = substitute
                substitute = alias
            substitutes.setdefault(s, {})[p] = substitute
            seen.add(p)
        weight.local_copies |= {
            s: substitutes[s][p]
            for s, p in weight.local_copies.items()
            if p in substitutes.get(s, ())
        }
    return substitutes, aliases


def sum_into_copies(*sums: Tensor, targets: Sequence[Tensor] | None = None) -> None:
    """Add tensors, the first ones first, and copy the sum into each target.

    The first tensor is changed.

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
    if len(ranks) == len(weight.stages) == 2:  # in place, because a sum of two has only one order
        (copy,) = local_stages

        def in_place() -> None:
            grad = get_grad(copy)
            works.append(transport.start_collective("all_reduce", ranks, grad, grad))

        return in_place

    def begin() -> None:
        grads = {s: get_grad(s) for s in local_stages}
        first = next(iter(grads.values()))
        # One row for each stage. The first rank with the stage fills it, and the all-reduce gives
        # all ranks the rows of all stages.
        rows = first.new_zeros((len(weight.stages), *first.shape))
        for row, s in zip(rows, weight.stages, strict=True):
            if s in local_stages and shape.first_rank_per_stage[s] == rank:
                row.copy_(grads[s])
        work = transport.start_collective("all_reduce", ranks, rows, rows)
        works.append(ChainedWork(work, partial(sum_into_copies, *rows, targets=[*grads.values()])))

    return begin
