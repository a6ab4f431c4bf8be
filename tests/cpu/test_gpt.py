"""Tests that a GPT in stages and on tensor-parallel ranks equals the GPT of one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from schedir.errors import UsageError
from schedir.models.gpt import GPTConfig, Stage, build_stage, loss
from schedir.runtime.autograd import split_backward
from schedir.tensor_parallel.mappings import get_shard_dim
from tests.cpu.gloo_processes import run

torch.set_num_threads(1)

SMALL = GPTConfig(vocab=13, layers=4, hidden=16, heads=4, context=8, tied=False)  # 13: padded
Gradients = dict[str, Tensor]


def make_batch() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(13, (2, 9), generator=g)
    targets = tokens[:, 1:].clone()
    targets[0, :3] = -1
    return tokens[:, :-1], targets


def build_stages(config: GPTConfig, stages: int) -> list[Stage]:
    return [build_stage(config, s, stages) for s in range(stages)]


def run_step(
    stages: Sequence[Stage], tp: dist.ProcessGroup | None = None, split: bool = False
) -> tuple[Tensor, Tensor, list[Gradients]]:
    """Run two microbatches. Return logits, loss and gradients by stage.

    If `split` is set, the backwards are split into I and W.
    """
    x, targets = make_batch()
    for _ in range(2):
        logits = x
        for stage in stages:
            logits = stage(logits)
        total = loss(logits, targets, tp)
        if not split:
            torch.autograd.backward(total)
            continue
        with split_backward.defer_weight_gradients(split_backward.DeferredGradients()) as tape:
            torch.autograd.backward(total)
        assert len(tape) == 4 * SMALL.layers + 2
        tape.run()
    grads = [{n: p.grad for n, p in s.named_parameters() if p.grad is not None} for s in stages]
    return logits.detach(), total.detach(), grads


def tensors_close(actual: Tensor, expected: Tensor, limit: float = 1e-5) -> bool:
    return bool((actual - expected).norm() <= limit * expected.norm())


@pytest.mark.parametrize("division", [(2, 2), (1, 1, 1, 1), (0, 4, 0), (1, 1, 2)])
def test_stages_equal_model_in_one_stage(division: tuple[int, ...]) -> None:
    expected, expected_loss, (expected_grads,) = run_step(build_stages(SMALL, 1))
    count = len(division)
    stages = [build_stage(SMALL, s, count, layers_per_stage=division) for s in range(count)]
    assert tuple(len(stage.layers) for stage in stages) == division
    actual, actual_loss, grads = run_step(stages)
    assert torch.equal(actual, expected) and torch.equal(actual_loss, expected_loss)
    merged = {name: g for stage in grads for name, g in stage.items()}
    assert merged.keys() == expected_grads.keys()
    assert all(torch.equal(merged[name], expected_grads[name]) for name in merged)


def test_tied_weights_start_equal_and_their_gradients_add_up() -> None:
    config = replace(SMALL, tied=True, layers=3)
    single_stage, stages = build_stages(config, 1), build_stages(config, 3)
    first, middle, last = (stage.tied_weight for stage in stages)
    assert first is not None and middle is None and last is not None
    assert first is not last and torch.equal(first, last)
    assert single_stage[0].tied_weight is None
    expected, _, (expected_grads,) = run_step(single_stage)
    assert torch.equal(run_step(stages)[0], expected)
    assert first.grad is not None and last.grad is not None
    assert tensors_close(first.grad + last.grad, expected_grads["embedding.weight"])
    assert "head.weight" not in expected_grads


def run_tensor_parallel_step(
    rank: int, config: GPTConfig, split: bool
) -> tuple[Tensor, Tensor, Gradients, Gradients, dict[str, int | None]]:
    tp = dist.group.WORLD
    stage = build_stage(config, 0, 1, tp=tp)
    initial = {name: p.detach().clone() for name, p in stage.named_parameters()}
    logits, total, (grads,) = run_step([stage], tp, split)
    return logits, total, initial, grads, {n: get_shard_dim(p) for n, p in stage.named_parameters()}


@pytest.mark.parametrize(("tied", "late"), [(False, False), (True, False), (True, True)])
def test_two_tensor_parallel_ranks_equal_one_process(tied: bool, late: bool) -> None:
    config = replace(SMALL, tied=tied)
    single_stage = build_stage(config, 0, 1)
    initial = {name: p.detach().clone() for name, p in single_stage.named_parameters()}
    logits, total, (grads,) = run_step([single_stage])

    ranks = run(run_tensor_parallel_step, 2, config, late)
    assert tensors_close(torch.cat([r[0] for r in ranks], -1)[..., : config.vocab], logits)
    assert all(tensors_close(r[1], total) for r in ranks)
    shard_dims = ranks[0][4]
    assert shard_dims.keys() == initial.keys()
    for name, dim in shard_dims.items():
        initial_shards, gradient_shards = [r[2][name] for r in ranks], [r[3][name] for r in ranks]
        for shards in (initial_shards, gradient_shards):
            if dim is None:
                assert torch.equal(shards[0], shards[1]), name
            else:
                shards[:] = [torch.cat(shards, dim)]
        rows = len(initial[name])
        assert torch.equal(initial_shards[0][:rows], initial[name]), name
        assert tensors_close(gradient_shards[0][:rows], grads[name]), name
    replicated_modules = {
        name.rpartition(".")[0] for name, dim in shard_dims.items() if dim is None
    }
    assert {"", "norm", "layers.0.mlp_norm", "layers.0.down"} <= replicated_modules


def build_with_too_many_ranks(rank: int) -> str:
    with pytest.raises(UsageError) as error:
        build_stage(GPTConfig(hidden=16, heads=1), 0, 1, tp=dist.group.WORLD)
    return error.value.fact


def test_more_tensor_parallel_ranks_than_heads_are_refused() -> None:
    assert all(run(build_with_too_many_ranks, 2))


def test_stage_number_out_of_range_is_refused() -> None:
    for stage in (-1, 2):
        with pytest.raises(UsageError):
            build_stage(SMALL, stage, 2)


def test_sequence_longer_than_context_is_refused() -> None:
    with pytest.raises(UsageError):
        build_stage(SMALL, 0, 2)(torch.zeros(1, 9, dtype=torch.int64))


def test_weights_depend_on_seed() -> None:
    def build_first_weight(seed: int) -> Tensor:
        return next(build_stage(replace(SMALL, seed=seed), 0, 1).parameters()).detach()

    assert torch.equal(build_first_weight(1), build_first_weight(1))
    assert not torch.equal(build_first_weight(1), build_first_weight(2))
