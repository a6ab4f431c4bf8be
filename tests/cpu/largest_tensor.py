"""Finds the largest tensor that is created."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class TensorSizeRecorder(TorchDispatchMode):
    """Records the sizes of new tensors with their own memory, and the largest of them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: list[int] = []

    @property
    def most(self) -> int:
        return max(self.sizes, default=0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        made = all(r.alias_info is None for r in func._schema.returns)
        if made and isinstance(out, Tensor) and not out.is_sparse:
            self.sizes.append(out.numel())
        return out
