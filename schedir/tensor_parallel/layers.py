"""Linear layers shared by a tensor-parallel group (1909.08053, section 3), splittable into dI, dW.

Each is made from the full weight, a tensor or one that is drawn by slice (`SlicedInit`), and keeps
its slice: so what is computed does not depend on how many ranks share it.

With `sequence_parallel` they share the tokens, too (2205.05198, section 4.2.2): "the same on all
ranks" is then each rank's own 1/t of them, (..., s / t, n).
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
    """Output features shared out: (..., n), the same on all ranks, to (..., k / t).

    Made from the full `weight` (k, n) and `bias` (k,), if it has one. Raises UsageError if t does
    not divide k.
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
        return self._add_bias(self.project(x))

    def forward_local(self, x: Tensor) -> Tensor:
        """The output, where others sum the gradient of x over the group."""
        return self._add_bias(self.project_local(x))

    def project(self, x: Tensor) -> Tensor:
        """The output without the bias, for who adds it along with what comes next."""
        return split_backward.linear(x, self.weight, input_rule=self.input_rule)

    def project_local(self, x: Tensor) -> Tensor:
        """That without the bias."""
        return split_backward.linear(x, self.weight)

    def _add_bias(self, y: Tensor) -> Tensor:
        return y if self.bias is None else y + self.bias


class RowParallelLinear(nn.Module):
    """Input features shared out: (..., n / t) to (..., k), the same on all ranks.

    Made from the full `weight` (k, n) and `bias` (k,), if it has one. Raises UsageError if t does
    not divide n.
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
        self.group, self.sequence_parallel = group, sequence_parallel
        self.weight = shard(weight, 1, group)
        self.bias: nn.Parameter | None = None
        if bias is not None:
            self.bias = mark_sequence_parallel(
                nn.Parameter(bias.clone()), group, sequence_parallel=sequence_parallel
            )

    def forward(self, x: Tensor) -> Tensor:
        return self.add_bias(
            leave_tp_region(
                self.project_partial(x), self.group, sequence_parallel=self.sequence_parallel
            )
        )

    def project_partial(self, x: Tensor) -> Tensor:
        """This rank's part of the sum that is the output without the bias."""
        return split_backward.linear(x, self.weight)

    def add_bias(self, y: Tensor) -> Tensor:
        """The output, of that sum: the bias after it, or it would be added t times."""
        return y if self.bias is None else y + self.bias
