"""Estimate the offsets between the clocks of hosts from messages.

No message arrives before it is sent. Suppose that host a posts a message at time `sent` of its
clock, and host b receives the message at time `got` of its clock. Then offset(b) - offset(a) <= got
- sent. Messages from b to a give a lower bound of offset(b) - offset(a).

Shortest paths combine these bounds over several hosts, as in NTP. The result is the middle of the
allowed range. The largest error is the distance of the result from the bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedir.errors import TraceError

Floats = NDArray[np.float64]


class ClockOffsets(NamedTuple):
    """The offsets of the clocks of hosts.

    Attributes:
        offsets: The time to subtract from the times of each host, in seconds. Shape (hosts,).
        error: The largest possible remaining difference between the clocks of two hosts, in
            seconds.
    """

    offsets: Floats
    error: float


def align_clocks(
    hosts: Sequence[str],
    sender: NDArray[np.int64],
    receiver: NDArray[np.int64],
    transfer_times: Floats,
) -> ClockOffsets:
    """Return the offsets of the clocks of hosts, from messages between them.

    Args:
        hosts: The names of the hosts, for errors.
        sender: The number of the sending host of each message. Shape (messages,).
        receiver: The number of the receiving host. Shape (messages,).
        transfer_times: The time of arrival by the receiver's clock minus the time of posting by the
            sender's clock, in seconds. Shape (messages,).

    Raises:
        TraceError: The messages contradict each other, because clocks drift or jump. Or two hosts
            are not connected by messages in both directions.
    """
    # The upper bound of offset(column) - offset(row), in seconds.
    max_offset = np.full((len(hosts), len(hosts)), np.inf)
    np.fill_diagonal(max_offset, 0.0)
    np.minimum.at(max_offset, (sender, receiver), transfer_times)
    for middle in range(len(hosts)):  # the algorithm of Floyd and Warshall
        max_offset = np.minimum(max_offset, max_offset[:, middle, None] + max_offset[None, middle])
    if (np.diag(max_offset) < 0).any():
        raise TraceError(
            "the clocks of hosts cannot be aligned: for any clock offsets, some message is "
            f"received at least {-float(np.diag(max_offset).min()):.3g} s before it was sent"
        )
    if not np.isfinite(max_offset).all():
        row, column = map(int, np.argwhere(~np.isfinite(max_offset))[0])
        raise TraceError(
            "the clocks of hosts cannot be aligned: no messages go from "
            f"{hosts[row] or 'an unnamed host'} to {hosts[column] or 'an unnamed host'}"
        )
    # The latest and the earliest offsets satisfy all bounds, so their mean does too.
    offsets = (max_offset[0] - max_offset[:, 0]) / 2
    differences = offsets[None] - offsets[:, None]
    # The maximum is over both directions of each pair of hosts.
    return ClockOffsets(offsets, float((max_offset - differences).max()))
