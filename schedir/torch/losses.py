"""Losses by microbatch: torch keeps them in the order of the last stage's forwards, and takes the
loss of microbatch k as the k-th."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime


class ByMicrobatch(_PipelineScheduleRuntime):
    """torch's runtime, with the loss of each microbatch under its number."""

    _loss_of: dict[int, Tensor]
    _loss_kwargs: dict[str, Any] | None

    def _ran_forward(self, stage: Any, output: Any, mb_index: int) -> None:
        """Is called after every forward, and the loss of it."""

    def _maybe_compute_loss(
        self, stage: Any, output: Any, target_mbs: Any, mb_index: int, *_: Any
    ) -> None:
        if stage.is_last and self._loss_fn is not None and target_mbs is not None:
            more = self._loss_kwargs or {}
            self._loss_of[mb_index] = self._loss_fn(output, target_mbs[mb_index], **more)
        self._ran_forward(stage, output, mb_index)

    def _maybe_get_loss(self, stage: Any, mb_index: int) -> Tensor | None:
        return self._loss_of[mb_index] if stage.is_last and self._loss_of else None

    def _update_losses(self, stages: Any, losses: list[Tensor] | None) -> None:
        self._internal_losses[:] = [self._loss_of[mb] for mb in sorted(self._loss_of)]
        self._loss_of.clear()
        super()._update_losses(stages, losses)  # type: ignore[no-untyped-call]
