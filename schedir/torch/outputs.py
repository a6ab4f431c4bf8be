"""Refuse stages that write to an output again while that output is still needed.

torch sends an output while the next forward may already run, and keeps the last stage's outputs
until the step ends. A stage that returns a buffer of its own, and fills it again for the next
microbatch, would send or keep the wrong numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from schedir.errors import ModelError
from schedir.runtime.bits import bit_sum, versions_of

Key = tuple[int, int]  # stage and microbatch


class _Output(NamedTuple):
    """An output as its forward returned it."""

    number: int
    tensor: Tensor
    version: int
    bits: Tensor | None  # the sum of its bits, where values are compared


class Outputs:
    """The outputs of one rank's stages that are still needed in the step under way.

    torch counts most writes to a tensor. Writes through `.data`, a kernel or a replayed graph it
    does not count: with `by_value`, sums of the outputs' bits are compared, too.
    """

    def __init__(self, *, by_value: bool) -> None:
        self._by_value = by_value
        self._needed: dict[Key, list[_Output]] = {}
        self._latest: dict[int, int] = {}  # microbatch, by stage
        self._differs: list[tuple[Key, _Output, Tensor]] = []  # on a device, read at the end

    def add(self, stage: int, mb: int, tensors: Iterable[Any]) -> None:
        """Add the outputs of a forward. Refuse it if it wrote to those of the forward before."""
        self.require_unwritten((stage, self._latest.get(stage, -1)))
        self._latest[stage] = mb
        self._needed[stage, mb] = [
            _Output(k, tensor, _version(tensor), self._sum(tensor))
            for k, tensor in enumerate(tensors)
            if isinstance(tensor, Tensor)
        ]

    def passed_on(self, stage: int, mb: int) -> None:
        """Keep, of outputs that the next stage of this rank has read, those with a gradient.

        The next stage may have written to its inputs. Outputs with a gradient are needed until
        their backward.
        """
        key = stage, mb
        if key in self._needed:
            self._needed[key] = [
                each._replace(version=_version(each.tensor), bits=None)
                for each in self._needed[key]
                if each.tensor.requires_grad
            ]

    def release(self, stage: int, mb: int) -> None:
        """Forget the outputs of a forward whose backward begins, unless they have no gradient.

        A gradient that has come back shows that they were received. Without one, they may still be
        on their way until the step ends.
        """
        key = stage, mb
        self.require_unwritten(key)
        if any(output.tensor.requires_grad for output in self._needed.get(key, ())):
            del self._needed[key]

    def require_unwritten(self, key: Key) -> None:
        """Raise ModelError if an output that is needed was written to."""
        for output in self._needed.get(key, ()):
            if _version(output.tensor) != output.version:
                raise _written(key, output)
            if output.bits is None:
                continue
            differs = self._sum(output.tensor) != output.bits
            if output.tensor.device.type != "cpu":
                self._differs.append((key, output, differs))  # the host waits only at the end
            elif differs:
                raise _written(key, output)

    def finish(self) -> None:
        """Raise ModelError if any output that is needed until the end was written to."""
        for key in self._needed:
            self.require_unwritten(key)
        self._needed.clear()
        self._latest.clear()
        for key, output, differs in self._differs:
            if bool(differs):
                raise _written(key, output)
        self._differs.clear()

    def _sum(self, tensor: Tensor) -> Any:
        plain = type(tensor) is Tensor and tensor.layout is torch.strided
        return bit_sum(tensor.detach()) if self._by_value and plain else None


def _version(tensor: Tensor) -> int:
    (version,) = versions_of([tensor])
    return version


def _written(key: Key, output: _Output) -> ModelError:
    stage, mb = key
    return ModelError(
        f"output {output.number} of stage {stage} for microbatch {mb} was written to again while "
        "it was still needed: another forward or the loss would send or use wrong numbers",
        hint="return a tensor of its own for each microbatch, as buffer.clone()",
        fields=["stages"],
    )
