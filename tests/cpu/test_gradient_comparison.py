"""Tests of `compare_gradients`, which lists gradients that differ from a plain loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from schedir.testing.gradient_comparison import (
    GradientDifference,
    GradientDump,
    StageLocation,
    WrongGradients,
    compare_gradients,
)
from schedir.testing.unpipelined_model import UnpipelinedModel, split_batch
from tests.cpu.torch_pipelines import WIDTH, TiedModel, make_model

Gradients = dict[str, Tensor | None]


def make_loop(
    stages: nn.Module, microbatches: int, divisor: float, seed: int = 0
) -> UnpipelinedModel:
    numbers = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(2 * microbatches, WIDTH, generator=numbers) for _ in range(2))
    return UnpipelinedModel(stages, split_batch((x, y), microbatches, mse_loss), mse_loss, divisor)


def list_differences(
    loop: UnpipelinedModel, *dumps: GradientDump, **options: Any
) -> tuple[GradientDifference, ...]:
    with pytest.raises(WrongGradients) as caught:
        compare_gradients(loop, dumps, **options)
    return caught.value.differences


def sum_gradients(loop: UnpipelinedModel, factors: list[float]) -> Gradients:
    """Return the weighted sum of the gradients of the microbatches, in the model's precision."""
    total: Gradients = {}
    loop.model.zero_grad()
    for mb, factor in zip(loop.microbatches, factors, strict=True):
        one = UnpipelinedModel(loop.model, [mb], loop.loss_fn, loop.divisor)
        for name, gradient in one.expected_gradients.items():
            earlier: Any = total.get(name, 0)
            total[name] = earlier + factor * gradient.value
    return total


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_exactly_different_stages_are_listed(data: st.DataObject) -> None:
    """Some of three stages have other factors of microbatches, and may have noise."""
    M = data.draw(st.integers(1, 6))
    loop = make_loop(make_model(3), M, M, data.draw(st.integers(0, 99)))
    stages = data.draw(st.sets(st.integers(0, 2), min_size=1))
    expected = sum_gradients(loop, [1.0] * M)
    factors = st.sampled_from([0.0, 0.9, 1.001, 2.0, -1.0])
    counts = data.draw(st.lists(factors, min_size=M, max_size=M))
    noise = data.draw(st.sampled_from([0.0, 1e-4, 1.0]))
    numbers = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    bad = {
        name: gradient + noise * torch.randn(gradient.shape, generator=numbers)
        for name, gradient in drop_missing(sum_gradients(loop, counts)).items()
    }
    dumped: Gradients = {n: (bad if int(n[0]) in stages else expected)[n] for n in expected}
    listed_differences = list_differences(loop, GradientDump(dumped).infer_stages())
    listed = [stage for difference in listed_differences for stage in difference.stages]
    assert len(listed) == len(stages) and {*listed} == stages
    for difference in listed_differences:
        assert difference.has_all_parameters
        errors = [relative_error(loop, name, dumped[name]) for name in difference.names]
        assert difference.error == pytest.approx(max(errors), rel=0.01)


def relative_error(loop: UnpipelinedModel, name: str, actual: Tensor | None) -> float:
    expected = loop.expected_gradients[name].value.double()
    assert actual is not None
    return float((actual.double() - expected).norm() / expected.norm())


def drop_missing(gradients: Gradients) -> Mapping[str, Tensor]:
    return {name: gradient for name, gradient in gradients.items() if gradient is not None}


def test_single_parameters_are_listed() -> None:
    loop = make_loop(make_model(2), 4, 4)
    dumped = sum_gradients(loop, [1.0] * 4)
    dumped["1.linear.weight"] = None
    dumped["1.linear.bias"] = sum_gradients(loop, [1.0, 1.0, 1.0, 0.0])["1.linear.bias"]
    weight, bias = list_differences(loop, GradientDump(dumped).infer_stages())
    assert weight.names == ("1.linear.weight",) and weight.problem == "no gradient"
    assert bias.names == ("1.linear.bias",) and bias.problem != "no gradient"
    assert not weight.has_all_parameters and not bias.has_all_parameters


def test_none_is_accepted_for_gradients_of_other_ranks() -> None:
    loop = make_loop(make_model(2), 2, 2)
    gradients = sum_gradients(loop, [1.0, 1.0])
    ranks = [
        GradientDump({n: g if n.startswith(str(rank)) else None for n, g in gradients.items()})
        for rank in range(2)
    ]
    assert compare_gradients(loop, ranks) < 1e-6
    ranks[1] = GradientDump(dict.fromkeys(gradients))
    (difference,) = list_differences(loop, *ranks)
    assert difference.names == ("1.linear.weight", "1.linear.bias")
    assert difference.locations == (StageLocation(None, None),)


def test_nonfinite_gradients_are_reported() -> None:
    loop = make_loop(make_model(3), 2, 2)
    dumped = sum_gradients(loop, [1.0, 1.0])
    bad: Gradients = {
        n: g * float("nan") if n[0] < "2" else g for n, g in drop_missing(dumped).items()
    }
    (difference,) = list_differences(loop, GradientDump(bad).infer_stages())
    assert difference.problem == "not finite" and difference.stages == (0, 1)


def test_report_names_first_different_stage() -> None:
    loop = make_loop(make_model(3), 2, 2)
    noise: Gradients = {
        n: g + torch.randn_like(g) * (n[0] < "2")
        for n, g in drop_missing(sum_gradients(loop, [1, 1])).items()
    }
    with pytest.raises(WrongGradients) as caught:
        compare_gradients(loop, [GradientDump(noise).infer_stages()])
    text = str(caught.value)
    assert "the error begins in a backward of stage 1, or the gradient from stage 2" in text


def test_different_replicas_are_listed_by_rank() -> None:
    loop = make_loop(make_model(2), 4, 4)
    ranks = [
        GradientDump(sum_gradients(loop, f)).infer_stages()
        for f in ([2.0, 2, 0, 0], [0, 0, 2.0, 2])
    ]
    listed_differences = list_differences(loop, *ranks, replicas=2)
    locations = {location for difference in listed_differences for location in difference.locations}
    assert locations == {StageLocation(stage, rank) for stage in range(2) for rank in range(2)}
    assert "rank 0" in str(listed_differences[0]) and "rank 1" in str(listed_differences[1])


def test_tied_weights_keep_names_of_each_rank() -> None:
    torch.manual_seed(0)
    loop = make_loop(TiedModel(), 2, 2)
    expected = {name: gradient.value for name, gradient in loop.expected_gradients.items()}
    ranks = [
        GradientDump(
            {n: g / 2 if n == "embed.weight" else g for n, g in expected.items() if "head" not in n}
        ),
        GradientDump({"head.weight": expected["head.weight"] / 3}),
    ]
    first, last = list_differences(loop, *ranks)
    assert first.names == ("embed.weight",) and last.names == ("head.weight",)
    assert (first.error, last.error) == pytest.approx((1 / 2, 2 / 3))


def test_comparison_does_not_change_buffers() -> None:
    norm = nn.Sequential(nn.BatchNorm1d(WIDTH))
    loop = make_loop(norm, 2, 2)
    first = loop.expected_gradients
    second_loop = UnpipelinedModel(loop.model, loop.microbatches, loop.loss_fn, loop.divisor)
    assert not norm[0].running_mean.any()  # type: ignore[operator]
    assert torch.equal(first["0.weight"].value, second_loop.expected_gradients["0.weight"].value)


def test_zero_tolerance_requires_equal_bits() -> None:
    loop = make_loop(make_model(2), 2, 2)
    dumped: Gradients = {
        n: g * (1 + 1e-7) for n, g in drop_missing(sum_gradients(loop, [1.0, 1.0])).items()
    }
    assert 0 < compare_gradients(loop, [GradientDump(dumped)]) < 1e-6
    list_differences(loop, GradientDump(dumped), tolerance=0.0)
