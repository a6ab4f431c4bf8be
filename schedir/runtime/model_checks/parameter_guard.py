"""Refuse a step after the set of trained parameters has changed."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence, ValuesView
from itertools import chain
from operator import attrgetter

from torch import Tensor, nn

from schedir.errors import ModelError
from schedir.runtime.parameters.optimizer_inspection import list_stepped_parameters

_requires_grad = attrgetter("requires_grad")


class ParameterGuard:
    """Checks that a rank trains the same parameters as when its gradient buffers were created.

    A parameter that is unfrozen later has no gradient buffer, so its gradient would not be zeroed,
    scaled or reduced. A parameter that is frozen later keeps its buffer, so the optimizer would
    still step it.

    Args:
        stages: The stages of the rank, by number.
    """

    def __init__(self, stages: Mapping[int, nn.Module]) -> None:
        self.stages = stages
        self._record_parameters()

    def _record_parameters(self) -> None:
        submodules = [
            submodule for module in self.stages.values() for submodule in module.modules()
        ]
        # Views of the modules' dictionaries, which show later changes.
        self.tables: list[ValuesView[object]] = []
        for submodule in submodules:
            self.tables += (submodule._parameters.values(), submodule._modules.values())
        # Keep references, so that no new object gets the same address.
        self.objects: list[object] = [*chain.from_iterable(self.tables)]
        self.ids: list[int] = [*map(id, self.objects)]
        self.names: dict[int, dict[str, nn.Parameter]] = {
            s: dict(module.named_parameters(remove_duplicate=False))
            for s, module in self.stages.items()
        }
        self.parameters: list[nn.Parameter] = [
            *dict.fromkeys(
                p for stage_parameters in self.names.values() for p in stage_parameters.values()
            )
        ]
        self.trained_flags: list[bool] = [*map(_requires_grad, self.parameters)]

    def require_unchanged(self, program: str = "") -> None:
        """Check that the set of trained parameters has not changed.

        If nothing has changed, the check takes microseconds.

        Args:
            program: The name of the program, for the error.

        Raises:
            ModelError: A parameter was added, removed, replaced, frozen or unfrozen.
        """
        has_same_ids = [*map(id, chain.from_iterable(self.tables))] == self.ids
        if has_same_ids and [*map(_requires_grad, self.parameters)] == self.trained_flags:
            return
        trained_before = dict(zip(self.parameters, self.trained_flags, strict=True))
        for s, module in self.stages.items():
            old_parameters = self.names[s]
            new_parameters = dict(module.named_parameters(remove_duplicate=False))
            for name in old_parameters | new_parameters:
                before, after = old_parameters.get(name), new_parameters.get(name)
                if change := _describe_change(before, after, trained_before):
                    raise ModelError(
                        f"{name} of stage {s} {change}",
                        program=program,
                        hint="create the executor after the last such change",
                    )
        self._record_parameters()  # only untrained parameters have changed


def require_untrained(
    module: nn.Module, stage: int, inputs: Sequence[Tensor], *, is_last: bool
) -> None:
    """Check that a stage with outputs that require no gradient has nothing to train.

    If the stage has trained parameters, the cause is usually `torch.no_grad()` or `detach()` in the
    stage or in the loss.

    Args:
        module: The stage.
        stage: The number of the stage.
        inputs: The inputs that require a gradient.
        is_last: True if the output is the loss.

    Raises:
        ModelError: An input requires a gradient, or a parameter is trained.
    """
    if inputs or any(map(_requires_grad, module.parameters())):
        subject, locations = ("loss", "stage and the loss") if is_last else ("output", "stage")
        raise ModelError(
            f"the {subject} of stage {stage} has no gradient, so its parameters are not trained",
            hint="remove torch.no_grad(), torch.inference_mode() and detach() from the "
            f"{locations}",
        )


def require_stage_parameters(
    outputs: Iterable[Tensor],
    module: nn.Module,
    allowed_parameters: Iterable[nn.Parameter],
    stage: int,
    optimizer: object,
) -> None:
    """Check that the outputs of a stage depend only on Parameters that the stage has.

    Examples of other Parameters are Parameters of a loss module, and Parameters in a list. The
    executor does not zero, scale or reduce the gradients of such Parameters. If the optimizer does
    not step them, the use may be intended, so this function only warns.

    Args:
        outputs: The outputs of the stage, or its loss.
        module: The stage.
        allowed_parameters: Other Parameters that the autograd graph of the outputs may contain.
        stage: The number of the stage.
        optimizer: The optimizer, or None.

    Raises:
        ModelError: The optimizer steps a Parameter that the stage does not have.
    """
    allowed = {*module.parameters(), *allowed_parameters}
    visited = set()
    nodes = [y.grad_fn for y in outputs]
    foreign_parameters: dict[nn.Parameter, None] = {}
    while nodes:
        node = nodes.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        nodes += [next_node for next_node, _ in node.next_functions]
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter) and leaf not in allowed:
            foreign_parameters[leaf] = None
    if not foreign_parameters:
        return
    stepped_parameters = {*list_stepped_parameters(optimizer)}
    shapes = " and ".join(str([*p.shape]) for p in foreign_parameters)
    fact = (
        f"stage {stage} or its loss uses Parameters of other modules (of shape {shapes}): schedir "
        "does not zero, scale or reduce their gradients"
    )
    hint = "assign them to the module of the stage (self.name = parameter), or freeze them"
    if any(p in stepped_parameters for p in foreign_parameters):
        raise ModelError(fact, hint=hint)
    warnings.warn(f"{fact}; {hint}", stacklevel=2)


def _describe_change(
    before: nn.Parameter | None,
    after: nn.Parameter | None,
    trained_before: Mapping[nn.Parameter, bool],
) -> str:
    """Return a description of a parameter's change, or "" if it does not affect training."""
    was_trained = before is not None and trained_before[before]
    is_trained = after is not None and after.requires_grad
    if before is after and was_trained != is_trained:
        old_kind, new_kind = ("trained", "frozen") if was_trained else ("frozen", "trained")
        return f"was {old_kind} when the executor was created, and is {new_kind} now"
    if before is after or not (was_trained or is_trained):
        return ""
    if before is None:
        return "was added after the executor was created"
    if after is None:
        return "was removed after the executor was created"
    return "was replaced after the executor was created"
