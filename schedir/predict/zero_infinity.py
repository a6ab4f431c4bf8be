"""Formulas of ZeRO-Infinity for memory, and for the bandwidth that offloading needs.

The formulas are equations 1 to 3 and 6 to 11 of arXiv 2104.07857, sections 3 and 4, for a
transformer that trains in 16 bits with Adam. The transformer has `layers` blocks (nl) of width
`hidden` (hd). A batch has `batch` sequences (bsz) of `sequence` tokens (seq). `checkpoint_interval`
(ci) is the number of blocks per activation checkpoint. If `batch` is the batch of one GPU, the
bytes of activations are also the bytes of one GPU.

Arithmetic intensity (ait in the paper) is the number of operations per byte moved.
"""

from __future__ import annotations

from math import inf
from typing import Final

from schedir.errors import UsageError, describe, to_float

# Bytes per parameter. The parameter and its gradient have 16 bits. The optimizer state has four
# numbers of 32 bits: Adam's two moments, the parameter and the gradient.
PARAMETER_BYTES: Final = 2
GRADIENT_BYTES: Final = 2
OPTIMIZER_BYTES: Final = 4 * 4
ACTIVATION_BYTES: Final = 2
# Operations per parameter and token: a product and a sum, for the forward, the recomputed forward,
# and twice for the backward.
OPERATIONS_PER_PARAMETER: Final = 2 * (1 + 1 + 2)


def count_parameters(layers: int, hidden: int) -> float:
    """Return the number of parameters, 12 nl hd^2 (equation 1).

    The weights of a block for queries, keys and values have the size (hd, 3hd) together. The other
    weights of the block have the sizes (hd, hd), (hd, 4hd) and (4hd, hd).

    Args:
        layers: Number of blocks.
        hidden: Width of a block.

    Raises:
        UsageError: A size is not an integer of at least 1.
    """
    layers, hidden = _require_integers(layers=layers, hidden=hidden)
    return 12.0 * layers * hidden**2


def zero_model_states(layers: int, hidden: int) -> float:
    """Return the bytes of parameters, gradients and optimizer state, 240 nl hd^2 (equation 2).

    These are 20 bytes per parameter. The 16 bytes in the documentation of
    `schedir.zero_model_states` do not include the gradient in 32 bits.

    Args:
        layers: Number of blocks.
        hidden: Width of a block.

    Raises:
        UsageError: A size is not an integer of at least 1.

    Example:
        >>> f"{zero_model_states(128, 25 * 1024) / 2**40:.2f} TiB"  # of 10^12 parameters: Figure 2a
        '18.31 TiB'
    """
    return (PARAMETER_BYTES + GRADIENT_BYTES + OPTIMIZER_BYTES) * count_parameters(layers, hidden)


def checkpoint_bytes(
    layers: int, hidden: int, sequence: int, batch: int, checkpoint_interval: int = 1
) -> float:
    """Return the bytes of activation checkpoints, 2 bsz seq hd nl / ci (equation 3).

    A backward recomputes forwards from these activations.

    Args:
        layers: Number of blocks.
        hidden: Width of a block.
        sequence: Number of tokens in a sequence.
        batch: Number of sequences in a batch.
        checkpoint_interval: Number of blocks per checkpoint.

    Raises:
        UsageError: A size is not an integer of at least 1.

    Example:
        >>> f"{checkpoint_bytes(128, 25 * 1024, 1024, 32) / 2**40:.2f} TiB"  # Figure 2a
        '0.20 TiB'
    """
    layers, hidden, sequence, batch, checkpoint_interval = _require_integers(
        layers=layers,
        hidden=hidden,
        sequence=sequence,
        batch=batch,
        checkpoint_interval=checkpoint_interval,
    )
    return ACTIVATION_BYTES * batch * sequence * hidden * layers / checkpoint_interval


def compute_efficiency(
    intensity: float, bandwidth: float, peak: float, *, overlapped: bool = False
) -> float:
    """Return the share of time in which a device computes, ait bw / (ait bw + peak) (equation 6).

    The equation is for transfers that do not overlap with compute. If all transfers overlap, the
    share is min(1, ait bw / peak). The programs of schedir have both kinds of transfers;
    docs/how-to/offload-to-the-host.md lists them.

    Args:
        intensity: Operations per byte moved.
        bandwidth: Bytes per second.
        peak: Operations per second.
        overlapped: True if all transfers overlap with compute.

    Raises:
        UsageError: A rate is not a finite number above 0.

    Example:
        >>> intensity = intensity_of_parameters(1024, batch=1)
        >>> f"{compute_efficiency(intensity, 70e9, 70e12):.0%}"  # section 4.2: over half at 70 GB/s
        '51%'
    """
    ait, bw, peak = _require_rates(intensity=intensity, bandwidth=bandwidth, peak=peak)
    return min(1.0, ait * bw / peak) if overlapped else ait * bw / (ait * bw + peak)


def required_bandwidth(
    share: float, intensity: float, peak: float, *, overlapped: bool = False
) -> float:
    """Return the bandwidth, in bytes per second, at which `compute_efficiency` returns `share`.

    This is equation 6 solved for the bandwidth.

    Args:
        share: The value of `compute_efficiency`. The share is below 1, or at most 1 if
            `overlapped`.
        intensity: Operations per byte moved.
        peak: Operations per second.
        overlapped: True if all transfers overlap with compute.

    Raises:
        UsageError: `share` is out of range, or a rate is not a finite number above 0.

    Example:
        >>> intensity = intensity_of_optimizer(1024, batch=1)
        >>> f"{required_bandwidth(0.5, intensity, 70e12) / 1e9:.0f} GB/s"
        '273 GB/s'
    """
    (share,) = _require_rates(share=share)
    if share > 1 or (share == 1 and not overlapped):
        raise UsageError(f"share must be less than 1, not {describe(share)}", fields=["share"])
    ait, peak = _require_rates(intensity=intensity, peak=peak)
    return peak / ait * (share if overlapped else share / (1 - share))


def count_operations(layers: int, hidden: int, sequence: int, batch: int) -> float:
    """Return the operations of a step, 2 * 4 * bsz * seq * parameters (equations 7 and 8).

    Each parameter and token costs a product and a sum. The backward costs two forwards, and one
    forward is recomputed. The products of queries and keys, and of scores and values, are not
    counted.

    Args:
        layers: Number of blocks.
        hidden: Width of a block.
        sequence: Number of tokens in a sequence.
        batch: Number of sequences in a batch.

    Raises:
        UsageError: A size is not an integer of at least 1.
    """
    sequence, batch = _require_integers(sequence=sequence, batch=batch)
    return OPERATIONS_PER_PARAMETER * batch * sequence * count_parameters(layers, hidden)


def intensity_of_parameters(sequence: int, batch: int) -> float:
    """Return the arithmetic intensity of moving parameters and gradients, seq bsz (equation 9).

    Parameters are loaded for the forward, the recomputed forward and the backward, and gradients
    are stored once. This moves 4 times 2 bytes per parameter.

    Args:
        sequence: Number of tokens in a sequence.
        batch: Number of sequences in a batch.

    Raises:
        UsageError: A size is not an integer of at least 1.
    """
    sequence, batch = _require_integers(sequence=sequence, batch=batch)
    return OPERATIONS_PER_PARAMETER * batch * sequence / (3 * PARAMETER_BYTES + GRADIENT_BYTES)


def intensity_of_optimizer(sequence: int, batch: int) -> float:
    """Return the arithmetic intensity of moving the optimizer state, seq bsz / 4 (equation 10).

    The state is loaded and stored once. This moves twice 16 bytes per parameter.

    Args:
        sequence: Number of tokens in a sequence.
        batch: Number of sequences in a batch.

    Raises:
        UsageError: A size is not an integer of at least 1.
    """
    sequence, batch = _require_integers(sequence=sequence, batch=batch)
    return OPERATIONS_PER_PARAMETER * batch * sequence / (2 * OPTIMIZER_BYTES)


def intensity_of_checkpoints(hidden: int, checkpoint_interval: int = 1) -> float:
    """Return the arithmetic intensity of moving activation checkpoints, 24 hd ci (equation 11).

    The checkpoints are stored and loaded once. The result depends on neither batch nor sequence,
    because operations and bytes are both proportional to batch and sequence.

    Args:
        hidden: Width of a block.
        checkpoint_interval: Number of blocks per checkpoint.

    Raises:
        UsageError: A size is not an integer of at least 1.
    """
    hidden, checkpoint_interval = _require_integers(
        hidden=hidden, checkpoint_interval=checkpoint_interval
    )
    return count_operations(checkpoint_interval, hidden, 1, 1) / (
        2 * checkpoint_bytes(checkpoint_interval, hidden, 1, 1, checkpoint_interval)
    )


def _require_integers(**numbers: object) -> list[int]:
    """Return the numbers. Raises UsageError if a number is not an integer of at least 1."""
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"{name} must be an int >= 1, not {describe(value)}", fields=[name])
    return [value for value in numbers.values() if isinstance(value, int)]


def _require_rates(**numbers: object) -> list[float]:
    """Return the numbers as floats. Raises UsageError if a number is not finite and above 0."""
    positive_rates = []
    for name, value in numbers.items():
        rate = to_float(value)
        if rate is None or not 0 < rate < inf:
            raise UsageError(f"{name} must be a number > 0, not {describe(value)}", fields=[name])
        positive_rates.append(rate)
    return positive_rates
