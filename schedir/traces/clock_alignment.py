"""Estimate the offsets between the clocks of hosts from messages.

No message is received before it is sent.  So of a message from a to b that was posted at `sent`
and was there at `got`, each by its own clock, offset(b) - offset(a) <= got - sent; those from b to
a bound it from below.  Such differences are bounded by the shortest paths, as in NTP; the offsets
taken lie in the middle of what the bounds allow, and the bounds say how far they may be off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedir.errors import TraceError

Floats = NDArray[np.float64]


class ClockOffsets(NamedTuple):
    """What to take from the times of each host, and by how much those of two may still differ."""

    offsets: Floats
    error: float


def align_clocks(
    hosts: Sequence[str],
    sender: NDArray[np.int64],
    receiver: NDArray[np.int64],
    transfer_times: Floats,
) -> ClockOffsets:
    """The offsets of the clocks of hosts, from messages between them.

    `sender` and `receiver` are hosts, by their numbers, and `transfer_times` is when a message was
    there, by the receiver's clock, less when it was posted, by the sender's; each of shape
    (messages,).

    Raises TraceError where messages contradict each other, as clocks that drift or jump make them,
    and where two hosts are joined by messages in one direction only, or by none.
    """
    most = np.full((len(hosts), len(hosts)), np.inf)  # of offset(column) - offset(row)
    np.fill_diagonal(most, 0.0)
    np.minimum.at(most, (sender, receiver), transfer_times)
    for via in range(len(hosts)):  # Floyd and Warshall
        most = np.minimum(most, most[:, via, None] + most[None, via])
    if (np.diag(most) < 0).any():
        raise TraceError(
            "the clocks of hosts cannot be aligned: messages come back before they were sent, by "
            f"{-float(np.diag(most).min()):.3g} s, whatever the offsets"
        )
    if not np.isfinite(most).all():
        row, column = map(int, np.argwhere(~np.isfinite(most))[0])
        raise TraceError(
            "the clocks of hosts cannot be aligned: no messages go from "
            f"{hosts[row] or 'one without a name'} to {hosts[column] or 'one without a name'}"
        )
    # The latest and the earliest that all bounds allow; so does what lies between them.
    offsets = (most[0] - most[:, 0]) / 2
    differ = offsets[None] - offsets[:, None]
    return ClockOffsets(offsets, float((most - differ).max()))  # of a pair seen from either side
