"""Unchanged: an executor trains the parameters that there were when it was made, and no others."""

from __future__ import annotations

from collections.abc import Mapping, ValuesView
from itertools import chain
from operator import attrgetter

from torch import nn

from schedir.errors import ModelError

_requires_grad = attrgetter("requires_grad")


class Unchanged:
    """What the stages of a rank trained when their buffers of gradients were made.

    A parameter that is trained since then has no place there: it would be neither zeroed nor
    scaled nor reduced.  One that is frozen since then would be stepped by what is left of others.
    """

    def __init__(self, stages: Mapping[int, nn.Module]) -> None:
        self.stages = stages
        self._look()

    def _look(self) -> None:
        owners = [owner for module in self.stages.values() for owner in module.modules()]
        # Views of the modules' own tables, which show what is there now.
        self.tables: list[ValuesView[object]] = []
        for owner in owners:
            self.tables += (owner._parameters.values(), owner._modules.values())
        # Kept, so that no other object gets the address of one.
        self.seen = [*chain.from_iterable(self.tables)]
        self.ids = [*map(id, self.seen)]
        self.names = {
            s: dict(module.named_parameters(remove_duplicate=False))
            for s, module in self.stages.items()
        }
        self.parameters = [*dict.fromkeys(p for own in self.names.values() for p in own.values())]
        self.trained = [*map(_requires_grad, self.parameters)]

    def expect(self) -> None:
        """Raise ModelError if what is trained has changed; it takes microseconds if not."""
        same = [*map(id, chain.from_iterable(self.tables))] == self.ids
        if same and [*map(_requires_grad, self.parameters)] == self.trained:
            return
        was = dict(zip(self.parameters, self.trained, strict=True))
        for s, module in self.stages.items():
            then, now = self.names[s], dict(module.named_parameters(remove_duplicate=False))
            for name in then | now:
                if what := _change(then.get(name), now.get(name), was):
                    raise ModelError(
                        f"{name} of stage {s} {what}",
                        hint="make the executor after the last such change",
                    )
        self._look()  # something else has changed


def _change(
    then: nn.Parameter | None, now: nn.Parameter | None, was: Mapping[nn.Parameter, bool]
) -> str:
    """What has become of a parameter, if it is of importance."""
    trained, trains = then is not None and was[then], now is not None and now.requires_grad
    if then is now and trained != trains:
        kinds = ("frozen", "trained")
        return f"was {kinds[trained]} when the executor was made, and is {kinds[trains]} now"
    if then is now or not (trained or trains):
        return ""
    if then is None:
        return "was not there when the executor was made"
    if now is None:
        return "was there when the executor was made, and is gone"
    return "is another Parameter than when the executor was made"
