"""Tests of the benchmark of kernels, run on a CPU."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks import kernels as benchmark

OPTIONS = argparse.Namespace(tokens=6, hidden=32, vocab=80, tp=2, widths=[16, 40])
SIZES = {  # bytes of bfloat16 tensors, times the number of their moves
    "cross entropy, statistics": 6 * 40 * 2,
    "cross entropy, gradient": 6 * 40 * 2 * 2,
    "cross entropy, both": 6 * 40 * 2 * 3,
    "bias + GELU, forward": 6 * 64 * 2 * 2,
    "bias + GELU, backward": 6 * 64 * 2 * 3,
    "residual + LayerNorm 16, forward": 6 * 16 * 2 * 4,
    "residual + LayerNorm 16, backward": 6 * 16 * 2 * 4,
    "residual + LayerNorm 40, forward": 6 * 40 * 2 * 4,
    "residual + LayerNorm 40, backward": 6 * 40 * 2 * 4,
}


@pytest.fixture(autouse=True)
def _cpu_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "DEVICE", "cpu")
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


def test_all_ways_return_equal_tensors() -> None:
    bytes_by_work = {}
    for work in benchmark.list_operations(OPTIONS):
        bytes_by_work[work.name] = work.bytes
        assert set(work.implementations) >= {"ours", "eager", "compiled"}
        # Each runs once, since some overwrite their inputs.
        results = {way: copy_tensors(run()) for way, run in work.implementations.items()}
        for way in results:
            for result, expected in zip(results[way], results["eager"], strict=True):
                torch.testing.assert_close(result.float(), expected.float(), rtol=0.02, atol=0.02)
    assert bytes_by_work == SIZES


def copy_tensors(result: Any) -> list[torch.Tensor]:
    return [x.detach().clone() for x in (result if isinstance(result, tuple) else (result,))]


def test_missing_compiler_is_reported_and_rest_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> Any:
        raise OSError("no compiler")

    def time_as_two_seconds(run: Callable[[], Any]) -> float:
        run()
        return 2.0

    monkeypatch.setattr(torch, "compile", lambda function, **options: fail)
    monkeypatch.setattr(benchmark, "find_spec", lambda name: None)
    assert not benchmark.print_operations(
        benchmark.list_operations(OPTIONS), 480 / 2 / 0.5, time_as_two_seconds
    )
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split()[-4:] == list(benchmark.IMPLEMENTATIONS)
    assert " ".join(rows[0].split()) == "cross entropy, statistics 0.0 2.000 0.50 0.50 - -"
    assert [row for row in rows if row.startswith("not measured")] == [
        *(f"not measured: {name}, compiled: OSError no compiler" for name in SIZES),
        "not measured: Liger-Kernel is not installed (pip install liger-kernel)",
    ]
    assert len(rows) == 2 * len(SIZES) + 1
    (line,) = benchmark.measure_weight_gradients(OPTIONS, time_as_two_seconds)
    assert line.endswith("1.00 times a product and a sum, 1.00 of the product alone")


def test_failing_kernel_raises_its_error() -> None:
    def fail() -> None:
        raise OSError

    with pytest.raises(OSError):
        benchmark.print_operations(
            iter([benchmark.Operation("x", 1, {"ours": fail})]), 1.0, lambda run: run() or 1
        )
