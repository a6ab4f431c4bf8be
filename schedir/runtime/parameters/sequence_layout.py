"""The order of tokens that tensor-parallel ranks share (sequence parallelism).

Rank r has those from r * s / t on, of the last dimension but one ("Reducing Activation
Recomputation in Large Transformer Models", arXiv 2205.05198, section 4.2.2).
"""

from __future__ import annotations

from torch import Tensor

from schedir.errors import UsageError


def split_by_rank(x: Tensor, ranks: int) -> Tensor:
    """Of (..., s, n) the tokens of each rank, one behind the other: (t, ..., s / t, n), contiguous.

    Raises UsageError for tokens that so many ranks cannot share evenly.
    """
    require_even_split(x.shape[-2], ranks)
    each: Tensor = x.unflatten(-2, (ranks, -1))
    return each.movedim(-3, 0).contiguous()


def join_sequence(shards: Tensor) -> Tensor:
    """Of (t, ..., s / t, n) the sequence, (..., s, n): of one sequence they lie so, else it is a
    copy."""
    return shards.movedim(0, -3).flatten(-3, -2)


def require_even_split(tokens: int, ranks: int) -> None:
    """Raise UsageError for tokens that so many ranks cannot share evenly."""
    if tokens % ranks:
        raise UsageError(
            f"{ranks} tensor-parallel ranks cannot share a sequence of {tokens} tokens evenly",
            hint=f"a length that {ranks} divides, or no sequence parallelism",
        )
