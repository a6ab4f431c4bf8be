"""Tests of `compare_gradients`, which lists gradients that differ from those of a plain loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from schedir.errors import UsageError
from schedir.testing.gradient_comparison import (
    GradientDifference,
    GradientDump,
    StageLocation,
    WrongGradients,
    compare_gradients,
)
from schedir.testing.unpipelined_model import UnpipelinedModel, split_batch
from tests.cpu.torch_pipelines import WIDTH, Tied, model

Gradients = dict[str, Tensor | None]


def loop_of(whole: nn.Module, microbatches: int, divisor: float, seed: int = 0) -> UnpipelinedModel:
    numbers = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(2 * microbatches, WIDTH, generator=numbers) for _ in range(2))
    return UnpipelinedModel(whole, split_batch((x, y), microbatches, mse_loss), mse_loss, divisor)


def differences(
    loop: UnpipelinedModel, *left: GradientDump, **options: Any
) -> tuple[GradientDifference, ...]:
    with pytest.raises(WrongGradients) as caught:
        compare_gradients(loop, left, **options)
    return caught.value.differences


def summed(loop: UnpipelinedModel, factors: list[float]) -> Gradients:
    """Return a step's gradients, where each microbatch has a factor, in the model's precision."""
    total: Gradients = {}
    loop.model.zero_grad()
    for mb, factor in zip(loop.microbatches, factors, strict=True):
        part = UnpipelinedModel(loop.model, [mb], loop.loss_fn, loop.divisor).expected_gradients
        for name, one in part.items():
            before = total.get(name)
            total[name] = factor * one.value if before is None else before + factor * one.value
    return total


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_exactly_the_stages_that_differ_are_listed(data: st.DataObject) -> None:
    """Some of three stages have other factors of microbatches, or added random numbers."""
    M = data.draw(st.integers(1, 6))
    loop = loop_of(model(3), M, M, data.draw(st.integers(0, 99)))
    stages = data.draw(st.sets(st.integers(0, 2), min_size=1))
    right = summed(loop, [1.0] * M)
    counts = data.draw(
        st.lists(st.sampled_from([0.0, 0.9, 1.001, 2.0, -1.0]), min_size=M, max_size=M)
    )
    if counts == [1.0] * M:
        counts[0] = 0.0
    noise = data.draw(st.sampled_from([0.0, 1e-4, 1.0]))
    numbers = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    bad = {
        name: gradient + noise * torch.randn(gradient.shape, generator=numbers)
        for name, gradient in loose(summed(loop, counts)).items()
    }
    left: Gradients = {n: (bad if int(n[0]) in stages else right)[n] for n in right}
    found = differences(loop, GradientDump(left).infer_stages())
    listed = [stage for difference in found for stage in difference.stages]
    assert len(listed) == len(stages) and {*listed} == stages
    for difference in found:
        assert difference.has_all_parameters
        errors = [relative_error(loop, name, left[name]) for name in difference.names]
        assert difference.error == pytest.approx(max(errors), rel=0.01)


def relative_error(loop: UnpipelinedModel, name: str, got: Tensor | None) -> float:
    expected = loop.expected_gradients[name].value.double()
    assert got is not None
    return float((got.double() - expected).norm() / expected.norm())


def loose(gradients: Gradients) -> Mapping[str, Tensor]:
    return {name: one for name, one in gradients.items() if one is not None}


# ---------------------------------------------------------------- single differences


def test_parameters_of_a_stage_may_differ() -> None:
    loop = loop_of(model(2), 4, 4)
    left = summed(loop, [1.0] * 4)
    left["1.linear.weight"] = None
    left["1.linear.bias"] = summed(loop, [1.0, 1.0, 1.0, 0.0])["1.linear.bias"]
    found = differences(loop, GradientDump(left).infer_stages())
    assert [(d.names, d.problem == "no gradient", d.has_all_parameters) for d in found] == [
        (("1.linear.weight",), True, False),
        (("1.linear.bias",), False, False),
    ]


def test_what_a_rank_returns_none_for_is_anothers() -> None:
    loop = loop_of(model(2), 2, 2)
    every = summed(loop, [1.0, 1.0])
    ranks = [
        GradientDump({n: g if n.startswith(str(rank)) else None for n, g in every.items()})
        for rank in range(2)
    ]
    assert compare_gradients(loop, ranks) < 1e-6
    ranks[1] = GradientDump(dict.fromkeys(every))
    (difference,) = differences(loop, *ranks)
    assert difference.names == ("1.linear.weight", "1.linear.bias")
    assert difference.locations == (StageLocation(None, None),)


def test_gradients_that_are_not_finite_are_called_so() -> None:
    loop = loop_of(model(3), 2, 2)
    left = summed(loop, [1.0, 1.0])
    bad: Gradients = {n: g * float("nan") if n[0] < "2" else g for n, g in loose(left).items()}
    (difference,) = differences(loop, GradientDump(bad).infer_stages())
    assert difference.problem == "not finite" and difference.stages == (0, 1)


def test_the_stage_in_which_differences_begin_is_named() -> None:
    loop = loop_of(model(3), 2, 2)
    noise: Gradients = {
        n: g + torch.randn_like(g) * (n[0] < "2") for n, g in loose(summed(loop, [1, 1])).items()
    }
    with pytest.raises(WrongGradients) as caught:
        compare_gradients(loop, [GradientDump(noise).infer_stages()])
    text = str(caught.value)
    assert "the error begins in a backward of stage 1, or the gradient from stage 2" in text


def test_replicas_that_differ_are_listed_by_rank() -> None:
    loop = loop_of(model(2), 4, 4)
    ranks = [GradientDump(summed(loop, f)).infer_stages() for f in ([2.0, 2, 0, 0], [0, 0, 2.0, 2])]
    found = differences(loop, *ranks, replicas=2)
    places = {place for difference in found for place in difference.locations}
    assert places == {StageLocation(stage, rank) for stage in range(2) for rank in range(2)}
    assert "rank 0" in str(found[0]) and "rank 1" in str(found[1])


def test_tied_weights_have_the_names_that_a_rank_gives_them() -> None:
    torch.manual_seed(0)
    loop = loop_of(Tied(), 2, 2)
    due = {name: one.value for name, one in loop.expected_gradients.items()}
    ranks = [
        GradientDump(
            {n: g / 2 if n == "embed.weight" else g for n, g in due.items() if "head" not in n}
        ),
        GradientDump({"head.weight": due["head.weight"] / 3}),
    ]
    first, last = differences(loop, *ranks)
    assert first.names == ("embed.weight",) and last.names == ("head.weight",)
    assert (first.error, last.error) == pytest.approx((1 / 2, 2 / 3))


def test_what_is_never_right_is_refused() -> None:
    dropout = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout())
    with pytest.raises(UsageError, match="model uses random numbers"):
        assert loop_of(dropout, 2, 2).expected_gradients
    assert loop_of(dropout.eval(), 2, 2).expected_gradients
    with pytest.raises(UsageError, match="no rank has a gradient"):
        compare_gradients(loop_of(model(2), 2, 2), [GradientDump({})])
    with pytest.raises(UsageError, match="must have the shape of its weight"):
        compare_gradients(
            loop_of(model(2), 2, 2), [GradientDump({"0.linear.bias": torch.zeros(2)})]
        )


def test_buffers_are_as_they_were() -> None:
    norm = nn.Sequential(nn.BatchNorm1d(WIDTH))
    loop = loop_of(norm, 2, 2)
    first = loop.expected_gradients
    again = UnpipelinedModel(loop.model, loop.microbatches, loop.loss_fn, loop.divisor)
    assert not norm[0].running_mean.any()  # type: ignore[operator]
    assert torch.equal(first["0.weight"].value, again.expected_gradients["0.weight"].value)


def test_bits_can_be_asked_for() -> None:
    loop = loop_of(model(2), 2, 2)
    left: Gradients = {n: g * (1 + 1e-7) for n, g in loose(summed(loop, [1.0, 1.0])).items()}
    assert 0 < compare_gradients(loop, [GradientDump(left)]) < 1e-6
    differences(loop, GradientDump(left), tolerance=0.0)
