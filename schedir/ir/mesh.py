"""Mesh: which process is which rank of the pipeline, in which replica, with which slice."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def mesh_of(ranks: int, tp: int, dp: int) -> NDArray[np.int64]:
    """The processes from 0 on by replica, rank and slice: shape (dp, ranks, tp).

    Tensor-parallel ranks stand side by side, then come the ranks of a pipeline, then replicas.
    """
    return np.arange(dp * ranks * tp, dtype=np.int64).reshape(dp, ranks, tp)
