"""Linear layers of a tensor-parallel group (arXiv 1909.08053, section 3), with a split backward.

A layer takes the full weight, as a tensor or as a `SlicedInit`, and keeps the shard of this rank.
Up to rounding, the result does not depend on the number of ranks.

Without `sequence_parallel`, some tensors are the same on all ranks. With `sequence_parallel`, the
ranks also divide the tokens (arXiv 2205.05198, section 4.2.2), and these tensors have only the
tokens of this rank, (..., s / t, n).

In shapes, s is the number of tokens and t the number of ranks. n and k are the numbers of input and
output features of the full weight.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from schedir.runtime.autograd import split_backward
from schedir.tensor_parallel.mappings import (
    ShardableWeight,
    enter_tp_region,
    leave_tp_region,
    mark_sequence_parallel,
    shard,
)


class ColumnParallelLinear(nn.Module):
    """A linear layer with divided output features: (..., n) on all ranks to (..., k / t).

    Args:
        weight: The full weight, of shape (k, n).
        bias: The full bias, of shape (k,), or None.
        group: The tensor-parallel group. None means one rank, without communication.
        sequence_parallel: True if the ranks also divide the tokens of the input.

    Raises:
        UsageError: t does not divide k.
    """

    def __init__(
        self,
        weight: ShardableWeight,
        bias: Tensor | None,
        group: ProcessGroup | None = None,
        *,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.input_rule = enter_tp_region(group, sequence_parallel=sequence_parallel)
        self.weight = shard(weight, 0, group)
        self.bias = None if bias is None else shard(bias, 0, group)

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's output features.

        Args:
            x: The input, the same on all ranks.
        """
        return self._add_bias(self.project(x))

    def forward_local(self, x: Tensor) -> Tensor:
        """Return the output, without communication.

        The caller must gather x and reduce its gradient over the group.

        Args:
            x: The input.
        """
        return self._add_bias(self.project_local(x))

    def project(self, x: Tensor) -> Tensor:
        """Return the output without the bias, which the caller fuses with the next operation.

        Args:
            x: The input, the same on all ranks.
        """
        return split_backward.linear(x, self.weight, input_rule=self.input_rule)

    def project_local(self, x: Tensor) -> Tensor:
        """Return the output without communication and without the bias.

        Args:
            x: The input.
        """
        return split_backward.linear(x, self.weight)

    def _add_bias(self, y: Tensor) -> Tensor:
        return y if self.bias is None else y + self.bias


class RowParallelLinear(nn.Module):
    """A linear layer with divided input features: (..., n / t) to (..., k) on all ranks.

    Args:
        weight: The full weight, of shape (k, n).
        bias: The full bias, of shape (k,), or None.
        group: The tensor-parallel group. None means one rank, without communication.
        sequence_parallel: True if the ranks also divide the tokens of the output.

    Raises:
        UsageError: t does not divide n.
    """

    def __init__(
        self,
        weight: ShardableWeight,
        bias: Tensor | None,
        group: ProcessGroup | None = None,
        *,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.group = group
        self.sequence_parallel = sequence_parallel
        self.weight = shard(weight, 1, group)
        self.bias: nn.Parameter | None = None
        if bias is not None:
            self.bias = mark_sequence_parallel(
                nn.Parameter(bias.clone()), group, sequence_parallel=sequence_parallel
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, summed over the group.

        Args:
            x: This rank's input features.
        """
        return self.add_bias(
            leave_tp_region(
                self.project_partial(x), self.group, sequence_parallel=self.sequence_parallel
            )
        )

    def project_partial(self, x: Tensor) -> Tensor:
        """Return this rank's part of the sum over the group, without the bias.

        Args:
            x: This rank's input features.
        """
        return split_backward.linear(x, self.weight)

    def add_bias(self, y: Tensor) -> Tensor:
        """Add the bias to the sum over the group. Before the sum, it would be added t times.

        Args:
            y: The sum.
        """
        return y if self.bias is None else y + self.bias
