"""Activation bytes that one transformer layer saves per microbatch (arXiv 2205.05198)."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, get_args

from schedir.errors import UsageError, describe

Recompute = Literal["none", "selective", "full"]


class Term(NamedTuple):
    """What is kept in section 4.1 of the paper: `bytes_per_element` bytes of so many numbers.

    There are s b h numbers, or a s^2 b of what is `is_quadratic`.  Those of one tensor-parallel
    rank are 1/t where a part is `is_tp_sharded`, and of the others where the sequence is, too
    (section 4.2).
    """

    name: str
    bytes_per_element: int
    is_tp_sharded: bool
    is_quadratic: bool = False


ACTIVATION_TERMS: Final = (
    Term("input of the first norm", 2, False),
    Term("input of Q, K and V", 2, False),
    Term("Q and K", 4, True),
    Term("V", 2, True),
    Term("output of the softmax", 2, True, True),
    Term("mask of its dropout", 1, True, True),
    Term("output of its dropout", 2, True, True),
    Term("input of the projection", 2, True),
    Term("mask of the dropout behind attention", 1, False),
    Term("input of the second norm", 2, False),
    Term("input of the first linear layer", 2, False),
    Term("input of GELU", 8, True),
    Term("input of the second linear layer", 8, True),
    Term("mask of the dropout behind the MLP", 1, False),
)


def compute_layer_terms(
    sequence: int,
    microbatch_size: int,
    hidden: int,
    heads: int,
    tp: int = 1,
    *,
    recompute: Recompute = "none",
    sequence_parallel: bool = False,
) -> dict[str, float]:
    """The parts of `activation_bytes_per_layer`, by what they are of."""
    sizes = {
        "sequence": sequence,
        "microbatch_size": microbatch_size,
        "hidden": hidden,
        "heads": heads,
    }
    for name, size in (sizes | {"tp": tp}).items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise UsageError(f"{name} is a number from 1 on, not {describe(size)}", fields=[name])
    if recompute not in get_args(Recompute):
        raise UsageError(
            f"recompute is {', '.join(get_args(Recompute))}, not {describe(recompute)}",
            fields=["recompute"],
        )
    whole = {
        False: sequence * microbatch_size * hidden,
        True: heads * sequence**2 * microbatch_size,
    }
    if recompute == "full":
        first = ACTIVATION_TERMS[0]
        return {first.name: float(first.bytes_per_element * whole[False])}
    return {
        term.name: term.bytes_per_element
        * whole[term.is_quadratic]
        / (tp if term.is_tp_sharded or sequence_parallel else 1)
        for term in ACTIVATION_TERMS
        if not (term.is_quadratic and recompute == "selective")
    }


def activation_bytes_per_layer(
    sequence: int,
    microbatch_size: int,
    hidden: int,
    heads: int,
    tp: int = 1,
    *,
    recompute: Recompute = "none",
    sequence_parallel: bool = False,
) -> float:
    """Bytes that a transformer layer keeps of a microbatch for its backward, on one of `tp`
    tensor-parallel ranks: Table 2 of arXiv 2205.05198, in 16 bits, with masks of a byte.

    With s, b, h, a and t: sbh(34 + 5as/h) (equation 1), sbh(10 + 24/t + 5as/(ht)) (2), and with
    `sequence_parallel` sbh/t (34 + 5as/h) (4).  "selective" recomputes softmax and dropout of
    attention and leaves the terms with 5as out (6); "full" keeps the input, 2sbh.

    It is the paper's layer.  That of `schedir.training` keeps other things where its operations are
    others: no as^2b of attention, which is one operation that keeps 4abs bytes, and no masks where
    nothing is dropped; and each norm keeps 2 numbers for each token, which the paper leaves out.
    What a layer does keep `measure_sizes` measures.  Attention is to all tokens, and no windows.

    Raises UsageError for sizes that are no numbers from 1 on, and another `recompute`.

    >>> from schedir import activation_bytes_per_layer
    >>> gpt3 = {"sequence": 2048, "microbatch_size": 1, "hidden": 12288, "heads": 96}
    >>> [f"{activation_bytes_per_layer(**gpt3, tp=8, recompute=r) / 1e6:.0f} MB" for r in ("none",
    ...     "selective")]
    ['579 MB', '327 MB']
    """
    return sum(
        compute_layer_terms(
            sequence, microbatch_size, hidden, heads, tp,
            recompute=recompute, sequence_parallel=sequence_parallel,
        ).values()
    )  # fmt: skip
