"""Tests that a GPT in stages and tensor-parallel slices equals the GPT of one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from schedir.errors import UsageError
from schedir.models.gpt import GPTConfig, Stage, build_stage, count_tokens, loss
from schedir.runtime.autograd import split_backward
from schedir.tensor_parallel.mappings import get_shard_dim
from tests.cpu.gloo_processes import run

torch.set_num_threads(1)

SMALL = GPTConfig(vocab=13, layers=4, hidden=16, heads=4, context=8, tied=False)  # 13: padded
Gradients = dict[str, Tensor]


def batch() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(13, (2, 9), generator=g)
    targets = tokens[:, 1:].clone()
    targets[0, :3] = -1
    return tokens[:, :-1], targets


def chain(config: GPTConfig, stages: int) -> list[Stage]:
    return [build_stage(config, s, stages) for s in range(stages)]


def step(
    stages: Sequence[Stage], tp: dist.ProcessGroup | None = None, late: bool = False
) -> tuple[Tensor, Tensor, list[Gradients]]:
    """Return logits, loss and gradients by stage after two microbatches, with late W if `late`."""
    x, targets = batch()
    for _ in range(2):
        logits = x
        for stage in stages:
            logits = stage(logits)
        total = loss(logits, targets, tp)
        if not late:
            torch.autograd.backward(total)
            continue
        with split_backward.defer_weight_gradients(split_backward.DeferredGradients()) as tape:
            torch.autograd.backward(total)
        assert len(tape) == 4 * SMALL.layers + 2
        tape.run()
    grads = [{n: p.grad for n, p in s.named_parameters() if p.grad is not None} for s in stages]
    return logits.detach(), total.detach(), grads


def near(got: Tensor, want: Tensor, limit: float = 1e-5) -> bool:
    return bool((got - want).norm() <= limit * want.norm())


# Stages


@pytest.mark.parametrize("stages", [2, 4])
def test_stages_in_a_chain_are_the_whole_model_bit_for_bit(stages: int) -> None:
    want, want_loss, (want_grads,) = step(chain(SMALL, 1))
    got, got_loss, grads = step(chain(SMALL, stages))
    assert torch.equal(got, want) and torch.equal(got_loss, want_loss)
    merged = {name: g for stage in grads for name, g in stage.items()}
    assert merged.keys() == want_grads.keys()
    assert all(torch.equal(merged[name], want_grads[name]) for name in merged)


def test_tied_copies_start_equal_and_their_gradients_add_up() -> None:
    config = replace(SMALL, tied=True, layers=3)
    whole, stages = chain(config, 1), chain(config, 3)
    first, middle, last = (stage.tied_weight for stage in stages)
    assert first is not None and middle is None and last is not None
    assert first is not last and torch.equal(first, last)
    assert whole[0].tied_weight is None
    want, _, (want_grads,) = step(whole)
    assert torch.equal(step(stages)[0], want)
    assert first.grad is not None and last.grad is not None
    assert near(first.grad + last.grad, want_grads["embedding.weight"])
    assert "head.weight" not in want_grads


def test_nothing_is_tied_without_tied() -> None:
    assert all(stage.tied_weight is None for stage in chain(SMALL, 2))


@pytest.mark.parametrize("tied", [False, True])
def test_the_split_backward_gives_the_same_bits(tied: bool) -> None:
    config = replace(SMALL, tied=tied)
    _, _, (want,) = step(chain(config, 1))
    _, _, (got,) = step(chain(config, 1), late=True)
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("division", [(0, 4, 0), (1, 1, 2)])
def test_an_uneven_division(division: tuple[int, ...]) -> None:
    stages = [build_stage(SMALL, s, 3, layers_per_stage=division) for s in range(3)]
    assert tuple(len(stage.layers) for stage in stages) == division
    assert torch.equal(step(stages)[0], step(chain(SMALL, 1))[0])


# Tensor parallelism


def shared(
    rank: int, config: GPTConfig, late: bool
) -> tuple[Tensor, Tensor, Gradients, Gradients, dict[str, int | None]]:
    tp = dist.group.WORLD
    stage = build_stage(config, 0, 1, tp=tp)
    start = {name: p.detach().clone() for name, p in stage.named_parameters()}
    logits, total, (grads,) = step([stage], tp, late)
    return logits, total, start, grads, {n: get_shard_dim(p) for n, p in stage.named_parameters()}


@pytest.mark.parametrize(("tied", "late"), [(False, False), (True, False), (True, True)])
def test_two_ranks_are_one(tied: bool, late: bool) -> None:
    config = replace(SMALL, tied=tied)
    whole = build_stage(config, 0, 1)
    start = {name: p.detach().clone() for name, p in whole.named_parameters()}
    logits, total, (grads,) = step([whole])

    ranks = run(shared, 2, config, late)
    assert near(torch.cat([r[0] for r in ranks], -1)[..., : config.vocab], logits)
    assert all(near(r[1], total) for r in ranks)
    cut = ranks[0][4]
    assert cut.keys() == start.keys()
    for name, dim in cut.items():
        starts, shares = [r[2][name] for r in ranks], [r[3][name] for r in ranks]
        if dim is None:
            assert torch.equal(starts[0], starts[1]) and torch.equal(shares[0], shares[1]), name
        else:
            starts, shares = [torch.cat(starts, dim)], [torch.cat(shares, dim)]
        rows = len(start[name])
        assert torch.equal(starts[0][:rows], start[name]), name
        assert near(shares[0][:rows], grads[name]), name
    whole_on_each = {name.rpartition(".")[0] for name, dim in cut.items() if dim is None}
    assert {"", "norm", "layers.0.mlp_norm", "layers.0.down"} <= whole_on_each


def too_many(rank: int) -> str:
    with pytest.raises(UsageError) as error:
        build_stage(GPTConfig(hidden=16, heads=1), 0, 1, tp=dist.group.WORLD)
    return error.value.fact


def test_more_ranks_than_heads_are_refused() -> None:
    assert all(run(too_many, 2))


# Configuration


def test_a_stage_that_is_not_there_is_refused() -> None:
    for stage in (-1, 2):
        with pytest.raises(UsageError):
            build_stage(SMALL, stage, 2)


def test_a_sequence_longer_than_the_context_is_refused() -> None:
    with pytest.raises(UsageError):
        build_stage(SMALL, 0, 2)(torch.zeros(1, 9, dtype=torch.int64))


def test_the_seed_decides_the_weights() -> None:
    def first(seed: int) -> Tensor:
        return next(build_stage(replace(SMALL, seed=seed), 0, 1).parameters()).detach()

    assert torch.equal(first(1), first(1)) and not torch.equal(first(1), first(2))


def test_a_token_sees_those_before_it_only() -> None:
    model = build_stage(SMALL, 0, 1)
    tokens, _ = batch()
    changed = tokens.clone()
    changed[:, 5] = (tokens[:, 5] + 1) % SMALL.vocab
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.isclose(before[:, 5:], after[:, 5:]).all(-1).any()


def test_count_tokens() -> None:
    assert count_tokens(batch()[1]) == 13
