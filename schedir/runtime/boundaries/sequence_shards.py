"""The division of a sequence's tokens among tensor-parallel ranks (sequence parallelism).

A sequence has s tokens. Rank r of t ranks has s / t tokens, from r * s / t on. Tokens are in the
second last dimension.

References:
    Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, arXiv
    2205.05198, section 4.2.2.
"""

from __future__ import annotations

from torch import Tensor

from schedir.errors import UsageError


def split_by_rank(x: Tensor, ranks: int) -> Tensor:
    """Return the tokens of each tensor-parallel rank, one rank after the other.

    Args:
        x: Values of all tokens, (..., s, n).
        ranks: The number of ranks, t.

    Returns:
        A contiguous tensor (t, ..., s / t, n).

    Raises:
        UsageError: t does not divide s.
    """
    require_even_split(x.shape[-2], ranks)
    rank_tokens: Tensor = x.unflatten(-2, (ranks, -1))
    return rank_tokens.movedim(-3, 0).contiguous()


def join_sequence(shards: Tensor) -> Tensor:
    """Return the sequence that `split_by_rank` has split.

    Args:
        shards: The tokens of each rank, (t, ..., s / t, n).

    Returns:
        The sequence, (..., s, n). It is a view if there is only one sequence, and otherwise a copy.
    """
    return shards.movedim(0, -3).flatten(-3, -2)


def require_even_split(tokens: int, ranks: int) -> None:
    """Check that tensor-parallel ranks can share a sequence evenly.

    Args:
        tokens: The number of tokens.
        ranks: The number of tensor-parallel ranks.

    Raises:
        UsageError: `ranks` does not divide `tokens`.
    """
    if tokens % ranks:
        raise UsageError(
            f"{ranks} tensor-parallel ranks cannot share a sequence of {tokens} tokens evenly",
            hint=f"use a multiple of {ranks} tokens, or no sequence parallelism",
        )
