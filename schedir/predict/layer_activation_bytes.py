"""Compute the bytes of activations that a transformer layer saves per microbatch.

References:
    Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models" (arXiv
    2205.05198), section 4.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, get_args

from schedir.errors import UsageError, describe

Recompute = Literal["none", "selective", "full"]


class Term(NamedTuple):
    """One tensor that a layer saves for its backward (arXiv 2205.05198, section 4.1).

    With sequence length s, microbatch size b, hidden size h and number of heads a, a tensor has
    s*b*h elements. A quadratic tensor has a*s^2*b elements.

    Attributes:
        name: The tensor, in words.
        bytes_per_element: Bytes for each element. A term can represent several tensors, and then
            has the sum of their bytes.
        is_tp_sharded: True if each of t tensor-parallel ranks saves 1/t of the tensor. With
            sequence parallelism, the other terms are sharded, too (section 4.2).
        is_quadratic: True if the size grows with the square of the sequence length.
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
    Term("mask of the dropout after attention", 1, False),
    Term("input of the second norm", 2, False),
    Term("input of the first linear layer", 2, False),
    Term("input of GELU", 8, True),
    Term("input of the second linear layer", 8, True),
    Term("mask of the dropout after the MLP", 1, False),
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
    """Return the bytes of each tensor that `activation_bytes_per_layer` adds up.

    Args:
        sequence: Number of tokens in a sequence.
        microbatch_size: Number of sequences in a microbatch.
        hidden: Hidden size.
        heads: Number of attention heads.
        tp: Tensor-parallel size.
        recompute: "none", "selective" or "full", see `activation_bytes_per_layer`.
        sequence_parallel: True if the tensor-parallel ranks use sequence parallelism.

    Returns:
        Name of the tensor -> bytes on one tensor-parallel rank.

    Raises:
        UsageError: A size is not an integer of at least 1, or `recompute` is not one of the three
            values.
    """
    sizes = {
        "sequence": sequence,
        "microbatch_size": microbatch_size,
        "hidden": hidden,
        "heads": heads,
    }
    for name, size in (sizes | {"tp": tp}).items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise UsageError(f"{name} must be an int >= 1, not {describe(size)}", fields=[name])
    if recompute not in get_args(Recompute):
        raise UsageError(
            f"recompute must be one of {', '.join(get_args(Recompute))}, not {describe(recompute)}",
            fields=["recompute"],
        )
    num_elements = {
        False: sequence * microbatch_size * hidden,
        True: heads * sequence**2 * microbatch_size,
    }
    if recompute == "full":
        first = ACTIVATION_TERMS[0]
        return {first.name: float(first.bytes_per_element * num_elements[False])}
    return {
        term.name: term.bytes_per_element
        * num_elements[term.is_quadratic]
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
    """Return the bytes of activations that a transformer layer saves per microbatch and rank.

    Activations have 16 bits, and dropout masks one byte. With s, b, h, a and t for sequence,
    microbatch size, hidden size, heads and tensor-parallel size:

    - without tensor parallelism: sbh (34 + 5as/h) (equation 1);
    - with t tensor-parallel ranks: sbh (10 + 24/t + 5as/(ht)) (equation 2);
    - with sequence parallelism: sbh/t (34 + 5as/h) (equation 4).

    The formulas are for the layer of the paper. A layer of `schedir.models` saves other tensors:

    - Its attention is one fused operation. This operation saves 4abs bytes instead of the terms
      with as^2b.
    - The layer saves no masks if there is no dropout.
    - Each norm saves 2 numbers per token, which the paper leaves out.

    `measure_sizes` measures the bytes that a layer really saves. The formulas also assume attention
    to all tokens, without windows.

    Args:
        sequence: Number of tokens in a sequence.
        microbatch_size: Number of sequences in a microbatch.
        hidden: Hidden size.
        heads: Number of attention heads.
        tp: Tensor-parallel size.
        recompute: "none" saves all terms. "selective" recomputes softmax and dropout of attention,
            and leaves out the terms with 5as (equation 6). "full" saves only the input of the
            layer, 2sbh bytes.
        sequence_parallel: True if the tensor-parallel ranks use sequence parallelism.

    Returns:
        Bytes on one tensor-parallel rank.

    Raises:
        UsageError: A size is not an integer of at least 1, or `recompute` is not one of the three
            values.

    References:
        Korthikanti et al. 2022 (arXiv 2205.05198), Table 2.

    Example:
        >>> from schedir import activation_bytes_per_layer
        >>> gpt3 = {"sequence": 2048, "microbatch_size": 1, "hidden": 12288, "heads": 96}
        >>> [f"{activation_bytes_per_layer(**gpt3, tp=8, recompute=r) / 1e6:.0f} MB"
        ...     for r in ("none", "selective")]
        ['579 MB', '327 MB']
    """
    return sum(
        compute_layer_terms(
            sequence, microbatch_size, hidden, heads, tp,
            recompute=recompute, sequence_parallel=sequence_parallel,
        ).values()
    )  # fmt: skip
