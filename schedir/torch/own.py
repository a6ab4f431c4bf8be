"""runtime="schedir": our Executor behind the face of torch's schedules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from schedir.errors import UsageError
from schedir.ir.program import Program
from schedir.ir.ties import Ties


class Own:
    """Runs the steps of a `schedir.torch.Schedule`."""

    def __init__(
        self,
        stages: Sequence[Any],
        program: Program,
        forward_program: Program,
        loss_fn: Any,
        scale_grads: bool,
        tied: Ties | None,
        group: Any,
    ) -> None:
        raise UsageError("runtime='schedir' is not there yet", hint="runtime='torch'")

    def step(
        self,
        arg_mbs: list[Any] | None,
        kwarg_mbs: list[Any] | None,
        target_mbs: list[Any] | None,
        losses: list[Any] | None,
        return_outputs: bool,
        loss_kwargs: dict[str, Any] | None,
    ) -> None:
        """Run one step, or the forwards alone if the stages' `has_backward` is False."""
        raise NotImplementedError
