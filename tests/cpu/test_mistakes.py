"""What is said of a wrong gradient: random mistakes are named, or called unknown, never others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from schedir.errors import UsageError
from schedir.testing import compared
from schedir.testing.compared import Left, Mistake, WrongGradients, compare
from schedir.testing.mistakes import KINDS
from schedir.testing.plain import Plain, cut
from tests.cpu.torchs import WIDTH, Tied, Twice, model

Gradients = dict[str, Tensor | None]


def loop_of(whole: nn.Module, microbatches: int, divisor: float, seed: int = 0) -> Plain:
    numbers = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(2 * microbatches, WIDTH, generator=numbers) for _ in range(2))
    return Plain(whole, cut((x, y), microbatches, mse_loss), mse_loss, divisor)


def told(loop: Plain, *left: Left, **options: Any) -> tuple[Mistake, ...]:
    with pytest.raises(WrongGradients) as caught:
        compare(loop, left, **options)
    return caught.value.mistakes


def summed(loop: Plain, factors: list[float]) -> Gradients:
    """A step in which each microbatch counts so often, in the model's own precision."""
    total: Gradients = {}
    loop.model.zero_grad()
    for mb, factor in zip(loop.microbatches, factors, strict=True):
        part = Plain(loop.model, [mb], loop.loss_fn, loop.divisor).due
        for name, one in part.items():
            before = total.get(name)
            total[name] = factor * one.value if before is None else before + factor * one.value
    return total


def every(M: int, R: int, d: float) -> list[tuple[str, list[float]]]:
    """All mistakes by their kinds, and how often they count each microbatch."""
    each = range(M)
    whole = [("twice", 2.0), ("zero", 0.0), ("replicas", R), ("replicas", 1 / R)]
    whole += [("not divided", n) for n in (d, M, M // R)]
    whole += [("divided again", n**-k) for n in {d, M, M // R} for k in (1, 2, 3 - (n != d))]
    some = [(kind, [float(f)] * M) for kind, f in whole if f != 1]
    for k in each if M > 1 else ():
        some.append(("microbatch missing", [float(j != k) for j in each]))
        some.append(("microbatch missing", [float(j == k) for j in each]))
        some.append(("microbatch twice", [1.0 + (j == k) for j in each]))
        some += [
            ("microbatch mistaken", [1.0 + (i == k) - (i == j) for i in each])
            for j in each
            if j != k
        ]
    for n in (n for n in range(1, M) if M % n == 0):
        by = n if n > 1 else M
        some.append(("last only", [float(k >= M - n) for k in each]))
        some.append(("first only", [float(k < n) for k in each]))
        some.append(("divided at every step", [by ** (k // n + 1.0 - M // n) for k in each]))
    for r in range(R if R > 1 else 0):
        own = [float(k * R // M == r) for k in each]
        some += [("replicas not summed", [f * c for c in own]) for f in (1, R)]
    return [(kind, factors) for kind, factors in some if factors != [1.0] * M]


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_a_known_mistake_is_named_and_no_other(data: st.DataObject) -> None:
    """On some stages of three; where several mistakes count alike, all of them are said."""
    R = data.draw(st.sampled_from([1, 1, 2]))
    M = data.draw(st.integers(1, 6).filter(lambda m: m % R == 0))
    d = data.draw(st.sampled_from([1.0, M]))
    loop = loop_of(model(3), M, d, data.draw(st.integers(0, 99)))
    _, factors = data.draw(st.sampled_from(every(M, R, d)))
    stages = data.draw(st.sets(st.integers(0, 2), min_size=1))
    right, bad = summed(loop, [1.0] * M), summed(loop, factors)
    left: Gradients = {n: (bad if int(n[0]) in stages else right)[n] for n in right}
    (mistake,) = told(loop, *[Left(left).by_prefix()] * R, replicas=R)
    assert mistake.stages == tuple(sorted(stages)) and mistake.every
    alike = {kind for kind, other in every(M, R, d) if other == pytest.approx(factors)}
    assert {*mistake.kinds} == alike


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_what_is_no_known_mistake_is_called_so(data: st.DataObject) -> None:
    """Noise, odd factors and odd counts: what is said of the numbers is true."""
    M = data.draw(st.integers(1, 5))
    loop = loop_of(model(2), M, M, data.draw(st.integers(0, 99)))
    kind = data.draw(st.sampled_from(["unknown", "factor", *["weights"] * (M > 1)]))
    right = summed(loop, [1.0] * M)
    if kind == "unknown":
        size = data.draw(st.sampled_from([1e-6, 1e-4, 1e-2, 1.0, 30.0]))
        numbers = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
        left: Gradients = {
            n: g + size * torch.randn(g.shape, generator=numbers) for n, g in loose(right).items()
        }
    elif kind == "factor":
        left = summed(loop, [data.draw(st.sampled_from([-1.0, 0.9, 1.001, 0.3, 7.3, 1e3]))] * M)
    else:
        counts = data.draw(st.permutations([0.7, 1.3, 0.31, 2.9, -1.7]))
        left = summed(loop, counts[:M])
    mistakes = told(loop, Left(left).by_prefix())
    assert {m.kinds for m in mistakes} == {(kind,)}


def loose(gradients: Gradients) -> Mapping[str, Tensor]:
    return {name: one for name, one in gradients.items() if one is not None}


# ---------------------------------------------------------------- single ones


def test_two_mistakes_at_once_are_both_said() -> None:
    loop = loop_of(model(2), 4, 4)
    (mistake,) = told(loop, Left(summed(loop, [4.0, 4.0, 0.0, 4.0])).by_prefix())
    assert mistake.kinds == ("microbatch missing",)
    assert mistake.findings[0].words.startswith("microbatch 2 is missing, and 4 times too large")


def test_parameters_of_a_stage_may_differ() -> None:
    loop = loop_of(model(2), 4, 4)
    left = summed(loop, [1.0] * 4)
    left["1.linear.weight"] = None
    left["1.linear.bias"] = summed(loop, [1.0, 1.0, 1.0, 0.0])["1.linear.bias"]
    mistakes = told(loop, Left(left).by_prefix())
    assert [(m.names, m.kinds, m.every) for m in mistakes] == [
        (("1.linear.weight",), ("missing",), False),
        (("1.linear.bias",), ("microbatch missing",), False),
    ]


def test_few_numbers_are_explained_with_the_others_of_their_stage() -> None:
    """Alone they may be explained by chance: here each microbatch adds the same to the bias."""
    x = torch.randn(8, WIDTH)
    whole = nn.Sequential(nn.Linear(WIDTH, 1))
    loop = Plain(whole, cut((x, x), 4, lambda y, _: y.sum()), lambda y, _: y.sum(), 4)
    (mistake,) = told(loop, Left(summed(loop, [1.0, 0.0, 1.0, 1.0])).by_prefix())
    assert mistake.every and [f.words for f in mistake.findings] == ["microbatch 1 is missing"]


def test_large_models_are_explained_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compared, "MOST_TERMS", 40)
    loop = loop_of(model(3), 4, 4)
    (mistake,) = told(loop, Left(summed(loop, [4.0] * 4)).by_prefix())
    assert mistake.kinds == ("not divided",) and len(mistake.names) == 6


def test_what_a_rank_returns_none_for_is_anothers() -> None:
    loop = loop_of(model(2), 2, 2)
    every = summed(loop, [1.0, 1.0])
    ranks = [
        Left({n: g if n.startswith(str(rank)) else None for n, g in every.items()})
        for rank in range(2)
    ]
    assert compare(loop, ranks) < 1e-6
    ranks[1] = Left(dict.fromkeys(every))
    (mistake,) = told(loop, *ranks)
    assert mistake.names == ("1.linear.weight", "1.linear.bias")
    assert mistake.kinds == ("held by nobody",)


def test_what_is_not_finite_is_said_and_where_it_begins() -> None:
    loop = loop_of(model(3), 2, 2)
    left = summed(loop, [1.0, 1.0])
    bad: Gradients = {n: g * float("nan") if n[0] < "2" else g for n, g in loose(left).items()}
    (mistake,) = told(loop, Left(bad).by_prefix())
    assert mistake.kinds == ("not finite",) and mistake.stages == (0, 1)


def test_unknown_differences_say_where_they_begin() -> None:
    loop = loop_of(model(3), 2, 2)
    noise: Gradients = {
        n: g + torch.randn_like(g) * (n[0] < "2") for n, g in loose(summed(loop, [1, 1])).items()
    }
    with pytest.raises(WrongGradients) as caught:
        compare(loop, [Left(noise).by_prefix()])
    text = str(caught.value)
    assert "it begins in the backward of stage 1, or in what stage 2 sends to it" in text


@pytest.mark.parametrize("again", [(1, 0), (0, 1), (2, 1), (1, 2)])
def test_uses_of_a_weight_are_told_apart(again: tuple[int, int]) -> None:
    """Also in one module: its parts add up, and one that counts otherwise is told."""
    loop = loop_of(nn.Sequential(Twice()), 3, 3)
    uses = loop.uses(["0.weight"])["0.weight"]
    assert [*uses] == [("0", 1), ("0", 2)]
    due = loop.due["0.weight"].value
    first, second = uses.values()
    torch.testing.assert_close(first + second, due.double().flatten())
    got = (again[0] * first + again[1] * second).float().view_as(due)
    (mistake,) = told(loop, Left({"0.weight": got}))
    assert mistake.kinds == (("use missing",) if 0 in again else ("use twice",))


def test_replicas_that_hold_different_things_are_told_by_rank() -> None:
    loop = loop_of(model(2), 4, 4)
    ranks = [Left(summed(loop, f)).by_prefix() for f in ([2.0, 2, 0, 0], [0, 0, 2.0, 2])]
    one, other = told(loop, *ranks, replicas=2)
    assert [p.rank for p in one.places] == [0, 0] and [p.rank for p in other.places] == [1, 1]
    assert "replicas not summed" in one.kinds and "replicas not summed" in other.kinds


def test_tied_weights_are_told_by_the_names_that_a_rank_gives_them() -> None:
    torch.manual_seed(0)
    loop = loop_of(Tied(), 2, 2)
    due = loop.due
    parts = loop.uses(["head.weight"])["head.weight"]
    own = {module: one.float().view(WIDTH, WIDTH) for (module, _), one in parts.items()}
    ranks = [
        Left({"embed.weight": own["embed"]} | {n: due[n].value for n in due if "middle" in n}),
        Left({"head.weight": own["head"]}),
    ]
    first, last = told(loop, *ranks)
    assert first.names == ("embed.weight",) and last.names == ("head.weight",)
    assert first.kinds == last.kinds == ("tied not summed",)


def test_what_is_never_right_is_refused() -> None:
    dropout = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout())
    with pytest.raises(UsageError, match="draws random numbers"):
        assert loop_of(dropout, 2, 2).due
    assert loop_of(dropout.eval(), 2, 2).due
    with pytest.raises(UsageError, match="no rank has a gradient"):
        compare(loop_of(model(2), 2, 2), [Left({})])
    with pytest.raises(UsageError, match="has shape"):
        compare(loop_of(model(2), 2, 2), [Left({"0.linear.bias": torch.zeros(2)})])


def test_buffers_are_as_they_were() -> None:
    norm = nn.Sequential(nn.BatchNorm1d(WIDTH))
    loop = loop_of(norm, 2, 2)
    first = loop.due
    again = Plain(loop.model, loop.microbatches, loop.loss_fn, loop.divisor)
    assert not norm[0].running_mean.any()  # type: ignore[operator]
    assert torch.equal(first["0.weight"].value, again.due["0.weight"].value)


def test_bits_can_be_asked_for() -> None:
    loop = loop_of(model(2), 2, 2)
    left: Gradients = {n: g * (1 + 1e-7) for n, g in loose(summed(loop, [1.0, 1.0])).items()}
    assert 0 < compare(loop, [Left(left)]) < 1e-6
    told(loop, Left(left), tolerance=0.0)


def test_every_kind_is_in_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "gradients.md").read_text()
    for kind, cause in KINDS.items():
        assert f"| {kind} |" in page and cause.removeprefix("often ") in page
