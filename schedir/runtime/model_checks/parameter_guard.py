"""Refuse a step after parameters were added, removed or replaced."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence, ValuesView
from itertools import chain
from operator import attrgetter

from torch import Tensor, nn

from schedir.errors import ModelError
from schedir.ir.program import Program
from schedir.runtime.parameters.tied_parameters import TiedWeight

_requires_grad = attrgetter("requires_grad")


class ParameterGuard:
    """What the stages of a rank trained when their buffers of gradients were made.

    A parameter that is trained since then has no place there: it would be neither zeroed nor
    scaled nor reduced.  One that is frozen since then would be stepped by what is left of others.
    """

    def __init__(self, stages: Mapping[int, nn.Module]) -> None:
        self.stages = stages
        self._record_parameters()

    def _record_parameters(self) -> None:
        owners = [owner for module in self.stages.values() for owner in module.modules()]
        # Views of the modules' own tables, which show what is there now.
        self.tables: list[ValuesView[object]] = []
        for owner in owners:
            self.tables += (owner._parameters.values(), owner._modules.values())
        # Kept, so that no other object gets the address of one.
        self.objects = [*chain.from_iterable(self.tables)]
        self.ids = [*map(id, self.objects)]
        self.names = {
            s: dict(module.named_parameters(remove_duplicate=False))
            for s, module in self.stages.items()
        }
        self.parameters = [*dict.fromkeys(p for own in self.names.values() for p in own.values())]
        self.trained_flags = [*map(_requires_grad, self.parameters)]

    def require_unchanged(self, program: str = "") -> None:
        """Raise ModelError if what is trained has changed; it takes microseconds if not."""
        same = [*map(id, chain.from_iterable(self.tables))] == self.ids
        if same and [*map(_requires_grad, self.parameters)] == self.trained_flags:
            return
        was = dict(zip(self.parameters, self.trained_flags, strict=True))
        for s, module in self.stages.items():
            then, now = self.names[s], dict(module.named_parameters(remove_duplicate=False))
            for name in then | now:
                if what := _describe_change(then.get(name), now.get(name), was):
                    raise ModelError(
                        f"{name} of stage {s} {what}",
                        program=program,
                        hint="make the executor after the last such change",
                    )
        self._record_parameters()  # something else has changed


def require_no_max_norm(
    program: Program, stages: Mapping[int, nn.Module], weights: Sequence[TiedWeight]
) -> None:
    """Look for embeddings that scale rows in their forwards (`max_norm`) where there are copies.

    Raises ModelError where other copies would not be scaled, or a schedule would decide when; and
    warns of replicas, in which each scales those that it uses.
    """
    for s, module in stages.items():
        tied = {id(weight.local_copies[s]) for weight in weights if s in weight.local_copies}
        for name, layer in module.named_modules():
            if not isinstance(layer, nn.Embedding | nn.EmbeddingBag) or layer.max_norm is None:
                continue
            fact = f"{name or 'the embedding'} of stage {s} scales rows of its weight in a forward"
            if program.shape.placement_rows > 1 or id(layer.weight) in tied:
                raise ModelError(
                    f"{fact}, and the weight has other copies or users",
                    program=program.name,
                    hint="max_norm=None",
                )
            if program.zero:
                raise ModelError(
                    f"{fact}, and each replica keeps its own part of it (zero {program.zero})",
                    program=program.name,
                    hint="max_norm=None, or zero=0",
                )
            if program.norm_check == "after_step":
                raise ModelError(
                    f"{fact}, and the step may have to be run again (norm_check 'after_step')",
                    program=program.name,
                    hint="max_norm=None, or compile(..., norm_check='before_step')",
                )
            if program.dp > 1:
                warnings.warn(f"{fact}: each replica those that it uses", stacklevel=2)


def require_stage_parameters(
    outputs: Iterable[Tensor],
    module: nn.Module,
    allowed_parameters: Iterable[nn.Parameter],
    stage: int,
    optimizer: object,
) -> None:
    """Look for Parameters behind outputs that their module does not have, and are not
    `allowed_parameters`.

    As of a loss that learns, or kept in a list: nobody zeroes, scales or reduces their gradients.
    Raises ModelError if the optimizer steps one of them; else it may be meant so, and this warns.
    """
    own, seen, nodes = (
        {*module.parameters(), *allowed_parameters},
        set(),
        [y.grad_fn for y in outputs],
    )
    strangers: dict[nn.Parameter, None] = {}
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter) and leaf not in own:
            strangers[leaf] = None
    if not strangers:
        return
    stepped = {p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]}
    shapes = " and ".join(str([*p.shape]) for p in strangers)
    fact = (
        f"stage {stage} or its loss computes with Parameters that are none of the stage's (of "
        f"shape {shapes}): it does not zero, scale or reduce their gradients"
    )
    hint = "let the stage's module have them, as self.name = parameter, or freeze them"
    if any(p in stepped for p in strangers):
        raise ModelError(fact, hint=hint)
    warnings.warn(f"{fact}; {hint}", stacklevel=2)


def _describe_change(
    before: nn.Parameter | None,
    after: nn.Parameter | None,
    trained_before: Mapping[nn.Parameter, bool],
) -> str:
    """What has become of a parameter, if it is of importance."""
    trained, trains = (
        before is not None and trained_before[before],
        after is not None and after.requires_grad,
    )
    if before is after and trained != trains:
        kinds = ("frozen", "trained")
        return f"was {kinds[trained]} when the executor was made, and is {kinds[trains]} now"
    if before is after or not (trained or trains):
        return ""
    if before is None:
        return "was not there when the executor was made"
    if after is None:
        return "was there when the executor was made, and is gone"
    return "is another Parameter than when the executor was made"
