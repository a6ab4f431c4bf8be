"""Count and number the processes by replica, pipeline rank and tensor-parallel rank."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def make_process_mesh(ranks: int, tp: int, dp: int) -> NDArray[np.int64]:
    """Number the processes by replica, pipeline rank and tensor-parallel rank.

    The processes of a tensor-parallel group have consecutive numbers. Within a replica, these
    groups are in the order of the pipeline ranks. The replicas follow one another.

    Args:
        ranks: Number of pipeline ranks.
        tp: Size of the tensor-parallel groups.
        dp: Number of replicas.

    Returns:
        The process numbers from 0, shape (dp, ranks, tp).
    """
    return np.arange(dp * ranks * tp, dtype=np.int64).reshape(dp, ranks, tp)


def find_process_count_error(processes: int, ranks: int, tp: int, dp: int) -> str:
    """Return an error about the number of processes.

    Args:
        processes: Number of processes that exist.
        ranks: Number of pipeline ranks.
        tp: Size of the tensor-parallel groups.
        dp: Number of replicas.

    Returns:
        One clause, or an empty string if the mesh has this number of processes.
    """
    needed = ranks * tp * dp
    if processes == needed:
        return ""
    count_text = "is 1 process" if processes == 1 else f"are {processes} processes"
    return f"there {count_text}, but pp {ranks} x tp {tp} x dp {dp} needs {needed}"


def describe_process(process: int, ranks: int, tp: int, dp: int) -> str:
    """Describe a process for a message.

    Args:
        process: Number of the process.
        ranks: Number of pipeline ranks.
        tp: Size of the tensor-parallel groups.
        dp: Number of replicas.

    Returns:
        The number and the pipeline rank. The tensor-parallel rank follows if tp > 1, and the
        replica if dp > 1.

    Example:
        >>> describe_process(1, 2, 2, 1), describe_process(3, 4, 1, 1), describe_process(5, 2, 2, 2)
        ('process 1 (pipeline rank 0, tp 1)', 'process 3 (pipeline rank 3)', \
'process 5 (pipeline rank 0, tp 1, replica 1)')
    """
    group, slice_ = divmod(process, tp)
    replica, rank = divmod(group, ranks)
    parts = [f"pipeline rank {rank}"]
    parts += [f"tp {slice_}"] * (tp > 1) + [f"replica {replica}"] * (dp > 1)
    return f"process {process} ({', '.join(parts)})"
