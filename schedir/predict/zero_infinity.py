"""Formulas of ZeRO-Infinity (arXiv 2104.07857): memory, and the bandwidth that offload needs.

Equations 1 to 11 of arXiv 2104.07857, sections 3 and 4.  All of them are for a transformer of
`layers` blocks (nl) of width `hidden` (hd) that trains in 16 bits with Adam, on `batch` sequences
(bsz) of `sequence` tokens (seq); `checkpoint_interval` is how many blocks there are to a checkpoint
(ci).  Bytes are of all that is trained together, or of one GPU where `batch` is that of one GPU.

What the paper calls arithmetic intensity (ait) is operations for each byte that is moved.  All
functions raise UsageError for what is no size, and no rate.
"""

from __future__ import annotations

from math import inf
from typing import Final

from schedir.errors import UsageError, describe, to_float

# Bytes of a parameter: itself and its gradient in 16 bits, and in 32 bits Adam's two moments, the
# parameter, and the gradient again.
PARAMETER_BYTES: Final = 2
GRADIENT_BYTES: Final = 2
OPTIMIZER_BYTES: Final = 4 * 4
ACTIVATION_BYTES: Final = 2
# Operations for each parameter and token: a product and a sum, forward, again, and twice backward.
OPERATIONS_PER_PARAMETER: Final = 2 * (1 + 1 + 2)


def count_parameters(layers: int, hidden: int) -> float:
    """How many parameters there are: 12 nl hd^2 (equation 1).

    In each block (hd, 3hd) of queries, keys and values, (hd, hd), (hd, 4hd) and (4hd, hd).
    """
    layers, hidden = _require_integers(layers=layers, hidden=hidden)
    return 12.0 * layers * hidden**2


def zero_model_states(layers: int, hidden: int) -> float:
    """Bytes of parameters, gradients and the optimizer's state: 240 nl hd^2 (equation 2).

    20 for each parameter: `schedir.zero_model_states` counts 16, without the gradient in 32 bits.

    >>> f"{zero_model_states(128, 25 * 1024) / 2**40:.2f} TiB"  # of 10^12 parameters: Figure 2a
    '18.31 TiB'
    """
    return (PARAMETER_BYTES + GRADIENT_BYTES + OPTIMIZER_BYTES) * count_parameters(layers, hidden)


def checkpoint_bytes(
    layers: int, hidden: int, sequence: int, batch: int, checkpoint_interval: int = 1
) -> float:
    """Bytes of the activations from which forwards run again: 2 bsz seq hd nl / ci (equation 3).

    >>> f"{checkpoint_bytes(128, 25 * 1024, 1024, 32) / 2**40:.2f} TiB"  # Figure 2a
    '0.20 TiB'
    """
    layers, hidden, sequence, batch, checkpoint_interval = _require_integers(
        layers=layers, hidden=hidden, sequence=sequence, batch=batch, every=checkpoint_interval
    )
    return ACTIVATION_BYTES * batch * sequence * hidden * layers / checkpoint_interval


def largest_operator_bytes(hidden: int) -> float:
    """Bytes that must be there at once of model states, whatever is elsewhere: 4 hd 4hd
    (equation 4).

    Parameters and gradient of the largest operator, a linear layer from hd to 4hd.

    >>> f"{largest_operator_bytes(64 * 1024) / 2**30:g} GiB"  # of 10^13 parameters: Figure 2a
    '64 GiB'
    """
    (hidden,) = _require_integers(hidden=hidden)
    return float((PARAMETER_BYTES + GRADIENT_BYTES) * hidden * 4 * hidden)


def activation_working_bytes(
    hidden: int, heads: int, sequence: int, batch: int, checkpoint_interval: int = 1
) -> float:
    """Bytes of the activations between two checkpoints, which a backward has at once:
    bsz seq ci (16 hd + 2 heads seq) (equation 5).

    >>> f"{activation_working_bytes(64 * 1024, 512, 1024, 4) / 2**30:g} GiB"  # Figure 2a
    '8 GiB'
    """
    hidden, heads, sequence, batch, checkpoint_interval = _require_integers(
        hidden=hidden, heads=heads, sequence=sequence, batch=batch, every=checkpoint_interval
    )
    return float(batch * sequence * checkpoint_interval * (16 * hidden + 2 * heads * sequence))


def compute_efficiency(
    intensity: float, bandwidth: float, peak: float, *, overlapped: bool = False
) -> float:
    """The share of its time that a device computes: ait bw / (ait bw + peak) (equation 6).

    `intensity` is operations for each byte moved, `bandwidth` bytes per second and `peak`
    operations per second.  The equation has nothing moved beside what is computed.  With all of it
    `overlapped`, what takes longer decides: min(1, ait bw / peak).

    Both are what schedir's programs take (docs/offload.md has which).

    >>> of = intensity_of_parameters(1024, batch=1)
    >>> f"{compute_efficiency(of, 70e9, 70e12):.0%}"  # section 4.2: 70 GB/s are over half
    '51%'
    """
    ait, bw, peak = _require_rates(intensity=intensity, bandwidth=bandwidth, peak=peak)
    return min(1.0, ait * bw / peak) if overlapped else ait * bw / (ait * bw + peak)


def required_bandwidth(
    share: float, intensity: float, peak: float, *, overlapped: bool = False
) -> float:
    """Bytes per second with which `compute_efficiency` is this share: equation 6 solved for bw.

    Raises UsageError for a share that is not between 0 and 1, which only what is overlapped can be.

    >>> f"{required_bandwidth(0.5, intensity_of_optimizer(1024, batch=1), 70e12) / 1e9:.0f} GB/s"
    '273 GB/s'
    """
    (share,) = _require_rates(share=share)
    if share > 1 or (share == 1 and not overlapped):
        raise UsageError(f"share is less than 1, not {describe(share)}", fields=["share"])
    ait, peak = _require_rates(intensity=intensity, peak=peak)
    return peak / ait * (share if overlapped else share / (1 - share))


def count_operations(layers: int, hidden: int, sequence: int, batch: int) -> float:
    """Operations of an iteration: 2 4 bsz seq parameters (equation 7), which is
    2 4 12 bsz seq nl hd^2 (equation 8).

    Each parameter and token costs a product and a sum; the backward costs two forwards, and one
    runs again.  What attention does with scores is left out.
    """
    sequence, batch = _require_integers(sequence=sequence, batch=batch)
    return OPERATIONS_PER_PARAMETER * batch * sequence * count_parameters(layers, hidden)


def intensity_of_parameters(sequence: int, batch: int) -> float:
    """Operations for each byte moved of parameters and gradients: seq bsz (equation 9).

    Parameters come for the forward, for its second run and for the backward, and gradients go once:
    4 times 2 bytes of each parameter.
    """
    sequence, batch = _require_integers(sequence=sequence, batch=batch)
    return OPERATIONS_PER_PARAMETER * batch * sequence / (3 * PARAMETER_BYTES + GRADIENT_BYTES)


def intensity_of_optimizer(sequence: int, batch: int) -> float:
    """Operations for each byte moved of the optimizer's state: seq bsz / 4 (equation 10).

    All of it comes, and goes: twice 16 bytes of each parameter.
    """
    sequence, batch = _require_integers(sequence=sequence, batch=batch)
    return OPERATIONS_PER_PARAMETER * batch * sequence / (2 * OPTIMIZER_BYTES)


def intensity_of_checkpoints(hidden: int, checkpoint_interval: int = 1) -> float:
    """Operations for each byte moved of `checkpoint_bytes`: 24 hd ci (equation 11).

    They go, and come: so neither batch nor sequence matters.
    """
    hidden, checkpoint_interval = _require_integers(hidden=hidden, every=checkpoint_interval)
    return count_operations(checkpoint_interval, hidden, 1, 1) / (
        2 * checkpoint_bytes(checkpoint_interval, hidden, 1, 1, checkpoint_interval)
    )


def _require_integers(**numbers: object) -> list[int]:
    """Numbers from 1 on.  Raises UsageError for others."""
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"{name} is a number from 1 on, not {describe(value)}", fields=[name])
    return [value for value in numbers.values() if isinstance(value, int)]


def _require_rates(**numbers: object) -> list[float]:
    """Numbers above 0.  Raises UsageError for others."""
    found = []
    for name, value in numbers.items():
        rate = to_float(value)
        if rate is None or not 0 < rate < inf:
            raise UsageError(f"{name} is a number above 0, not {describe(value)}", fields=[name])
        found.append(rate)
    return found
