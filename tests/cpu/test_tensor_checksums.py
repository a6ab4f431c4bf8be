"""Tests of the checksums of tensors, and of the changes that they detect."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from schedir import PipelineShape, compile
from schedir.errors import ExecutionError
from schedir.runtime import InProcessExecutor
from schedir.runtime.model_checks.tensor_fingerprint import compute_checksum
from schedir.schedules import one_f_one_b

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.complex64]
SIZES = st.sampled_from([1, 2, 300, 4096, 4097, 5000, 10_000])


@given(SIZES, st.sampled_from(DTYPES), st.randoms())
def test_checksum_detects_changed_element_and_order(
    size: int, dtype: torch.dtype, draw: object
) -> None:
    rng = torch.Generator().manual_seed(draw.randrange(2**31))  # type: ignore[attr-defined]
    numbers = (torch.randn(size, generator=rng, dtype=torch.float64) * 50).to(dtype)
    before = compute_checksum(numbers)
    assert compute_checksum(numbers.clone()) == before
    strided = torch.stack((numbers, numbers), 1)[:, 0]
    assert compute_checksum(strided) == before
    order = torch.randperm(size, generator=rng)
    assert (compute_checksum(numbers[order]) == before) == torch.equal(numbers[order], numbers)
    one, other = torch.randint(size, (2,), generator=rng).tolist()
    swapped = numbers.clone()
    swapped[one], swapped[other] = numbers[other], numbers[one]
    assert (compute_checksum(swapped) == before) == torch.equal(swapped, numbers)
    changed = numbers.clone()
    changed[one] += 1
    assert (compute_checksum(changed) == before) == torch.equal(changed, numbers)


def test_checksum_detects_swap_along_diagonal() -> None:
    """Rows of that matrix have 256 words, so such a swap changes a row sum and a column sum."""
    numbers = torch.arange(5000)
    for distance in (255, 257):
        swapped = numbers.clone()
        swapped[[600, 600 + distance]] = numbers[[600 + distance, 600]]
        assert compute_checksum(swapped) != compute_checksum(numbers)


def test_checksum_of_empty_tensor_is_zero() -> None:
    assert compute_checksum(torch.zeros(0, 3)) == 0
    assert compute_checksum(torch.zeros(0, dtype=torch.float64)) == 0


def test_checksum_resolves_conjugation_and_negation() -> None:
    z = torch.randn(5, dtype=torch.complex64)
    assert compute_checksum(z.conj()) == compute_checksum(z.conj().resolve_conj())
    assert compute_checksum(z.conj()) != compute_checksum(z)
    assert compute_checksum(z.conj().imag) == compute_checksum(-z.imag)


class _PermutedRows(torch.nn.Linear):
    """Permutes its rows with a generator that recomputation does not restore."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.randperm(len(x), generator=self.draws)
        return super().forward(x)[rows]

    draws = torch.Generator().manual_seed(3)


def test_recompute_with_permuted_rows_is_refused() -> None:
    stages = [_PermutedRows(6, 6) for _ in range(2)]
    program = compile(one_f_one_b, PipelineShape(2, 4), recompute="all")
    ranks = InProcessExecutor(program, stages, loss=torch.nn.functional.mse_loss, boundary=(9, 6))
    with pytest.raises(ExecutionError, match="returns a different output"):
        ranks.step(*torch.randn(2, 4, 9, 6))
