"""LossGradients: the gradient of the loss, from which the backward of a microbatch begins."""

from __future__ import annotations

import torch
from torch import Tensor

from schedir.runtime.program_state import ProgramService, ProgramState


class LossGradients(ProgramService):
    """The initial gradient of each backward of a step, and the factor of the gradient sums.

    Args:
        state: The state of the program.

    Attributes:
        grad_scale: The factor by which the gradient sums are multiplied before their reduction.
        initial_gradient: The gradient with which a backward begins. None means 1.
    """

    def __init__(self, state: ProgramState) -> None:
        super().__init__(state)
        self.grad_scale: float | Tensor = 1.0
        self.initial_gradient: Tensor | None = None

    def begin_step(self) -> None:
        """Set the attributes from the step's `grad_scale` and the loss scale."""
        self.grad_scale = self.state.batch.grad_scale
        loss_scale = self.state.options.gradients.loss_scale
        if loss_scale is None:
            return
        gradient = (loss_scale.value * self.grad_scale).float()
        if self.initial_gradient is None:
            self.initial_gradient = gradient
        else:  # in place, because a captured CUDA graph would read this memory
            self.initial_gradient.copy_(gradient)
        self.grad_scale = loss_scale.inverse

    def compute(self, mb: int) -> Tensor:
        """Return the initial gradient of the backward of a microbatch.

        With `accumulate_grads` the initial gradient is always `grad_scale`, because gradients are
        not scaled later. Otherwise it is `initial_gradient`, or NaN if the loss is not finite. NaN
        spreads to the gradients of the update, so all ranks detect that the loss is not finite.

        Args:
            mb: The microbatch.

        Returns:
            A 0-dimensional tensor.
        """
        loss = self.state.losses[mb]
        if self.state.options.gradients.accumulate_grads:
            return torch.as_tensor(self.grad_scale, dtype=loss.dtype, device=loss.device)
        initial = 1.0 if self.initial_gradient is None else self.initial_gradient
        return loss - loss + initial
