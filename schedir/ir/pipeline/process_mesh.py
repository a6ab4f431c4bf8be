"""Map a process number to its pipeline rank, replica and tensor-parallel rank."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def make_process_mesh(ranks: int, tp: int, dp: int) -> NDArray[np.int64]:
    """The processes from 0 on by replica, rank and slice: shape (dp, ranks, tp).

    Tensor-parallel ranks stand side by side, then come the ranks of a pipeline, then replicas.
    """
    return np.arange(dp * ranks * tp, dtype=np.int64).reshape(dp, ranks, tp)


def describe_process(process: int, ranks: int, tp: int, dp: int) -> str:
    """A process as every message names it.

    >>> describe_process(1, 2, 2, 1), describe_process(3, 4, 1, 1), describe_process(5, 2, 2, 2)
    ('process 1 (pipeline rank 0, tp 1)', 'process 3 (pipeline rank 3)', \
'process 5 (pipeline rank 0, tp 1, replica 1)')
    """
    of, slice_ = divmod(process, tp)
    replica, rank = divmod(of, ranks)
    parts = [f"pipeline rank {rank}"]
    parts += [f"tp {slice_}"] * (tp > 1) + [f"replica {replica}"] * (dp > 1)
    return f"process {process} ({', '.join(parts)})"
