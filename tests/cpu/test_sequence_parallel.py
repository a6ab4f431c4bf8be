"""Tests of sequence parallelism, compared with plain tensor parallelism and with one process."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from examples import bert, encoder_decoder
from examples.bert import BertConfig
from examples.encoder_decoder import EncoderDecoderConfig
from schedir import PipelineShape, compile
from schedir.errors import ModelError, UsageError
from schedir.models import gpt, llama
from schedir.models.llama_config import LlamaConfig
from schedir.runtime.autograd.split_backward import DeferredGradients, defer_weight_gradients
from schedir.runtime.executor import Executor
from schedir.runtime.parameters.buckets import is_summed_over_tp
from schedir.schedules import one_f_one_b
from schedir.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from schedir.tensor_parallel.mappings import (
    get_shard_dim,
    mark_sequence_parallel,
    select_local_tokens,
)
from schedir.tensor_parallel.vocab_parallel import (
    VocabParallelEmbedding,
    VocabParallelHead,
    shard_vocab,
)
from schedir.transports.gloo import GlooTransport
from tests.cases import ALL
from tests.cpu.gloo_processes import run
from tests.cpu.tiny_stages import gradients_by_stage
from tests.cpu.train_command import train, train_in_this_process

SHAPES = 40 if ALL else 12  # the number of random shapes for each number of ranks
CONFIG = gpt.GPTConfig(vocab=13, layers=2, hidden=16, heads=2, context=8)
Results = dict[str, Any]


def draw_normal(*shape: int, seed: int) -> Tensor:
    numbers = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=numbers, dtype=torch.float64)


class Net(nn.Module):
    """A model with all kinds of tensor-parallel layers. `group` is None in a single process."""

    def __init__(self, vocab: int, tokens: int, hidden: int, width: int, group: Any) -> None:
        super().__init__()
        self.group, self.sequence = group, group is not None

        def whole(parameter: Any) -> Any:
            return mark_sequence_parallel(parameter, group, sequence_parallel=self.sequence)

        how: Any = {"group": group, "sequence_parallel": self.sequence}
        table = shard_vocab(draw_normal(vocab, hidden, seed=1), group)
        self.embedding = VocabParallelEmbedding(table, **how)
        self.positions = whole(nn.Parameter(draw_normal(tokens, hidden, seed=2)))
        self.first = whole(nn.LayerNorm(hidden, dtype=torch.float64))
        self.up = ColumnParallelLinear(
            draw_normal(width, hidden, seed=3), draw_normal(width, seed=4), **how
        )
        self.down = RowParallelLinear(
            draw_normal(hidden, width, seed=5), draw_normal(hidden, seed=6), **how
        )
        self.last = whole(nn.RMSNorm(hidden, dtype=torch.float64))
        self.head = VocabParallelHead(table, vocab, **how)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + select_local_tokens(self.positions, self.group, sequence_parallel=self.sequence)
        x = x + self.down(F.gelu(self.up(self.first(x))))
        logits: Tensor = self.head(self.last(x))
        return logits


def run_backward(net: Net, tokens: Tensor, weights: Tensor, *, late: bool) -> Results:
    """Return the output and the gradients of a weighted sum of it.

    If `late`, the gradients of weights are computed separately.
    """
    logits = net(tokens)
    logits = torch.where(logits.isfinite(), logits, 0.0)  # padding
    loss = (logits * weights).sum()
    with defer_weight_gradients(DeferredGradients()) as tape:
        if late:
            torch.autograd.backward(loss)
            assert len(tape) == 4
        tape.run()
    if not late:
        torch.autograd.backward(loss)
    results: Results = {"logits": (logits.detach(), -1 if net.group else None)}
    return results | collect_gradients(net, net.group)


def collect_gradients(module: nn.Module, group: Any) -> Results:
    """Return gradients, summed over ranks if necessary, and the dimensions of their shards."""
    results = {}
    for name, p in module.named_parameters():
        assert p.grad is not None
        if is_summed_over_tp(p):
            dist.all_reduce(p.grad, group=group)
        results[name] = p.grad, get_shard_dim(p)
    return results


def find_wrong_shapes(t: int, group: Any, rank: int) -> list[str]:
    """Return the random shapes for which a gradient differs from that of one process."""
    draw, wrong_gradients = random.Random(t), []
    for _ in range(SHAPES):
        b, s, vocab = draw.randint(1, 3), t * draw.randint(1, 4), draw.randint(2, 9)
        hidden, width, late = draw.randint(1, 6), t * draw.randint(1, 4), draw.random() < 0.5
        seed = draw.randrange(1000)
        tokens = torch.randint(vocab, (b, s), generator=torch.Generator().manual_seed(seed))
        vocab_per_rank = -(-vocab // t)
        weights = F.pad(draw_normal(b, s, vocab, seed=seed), (0, vocab_per_rank * t - vocab))
        local_weights = weights[..., rank * vocab_per_rank : (rank + 1) * vocab_per_rank]
        shape = vocab, s, hidden, width
        parallel_results = run_backward(Net(*shape, group), tokens, local_weights, late=late)
        plain_results = run_backward(Net(*shape, None), tokens, weights[..., :vocab], late=late)
        for name, (value, shard_dim) in parallel_results.items():
            expected = plain_results[name][0]
            if shard_dim is not None:
                size = value.shape[shard_dim]
                padding = [0] * (2 * expected.dim())
                padding[-2 * (shard_dim % expected.dim()) - 1] = (
                    size * t - expected.shape[shard_dim]
                )
                expected = F.pad(expected, padding).narrow(shard_dim, rank * size, size)
            if not torch.allclose(value, expected, rtol=1e-10, atol=1e-10):
                wrong_gradients.append(f"{name} of {b} x {shape}, t {t}{', late' * late}")
    return wrong_gradients


# ---------------------------------------------------------------- with an executor


def make_executor(
    group: Any, program_options: Results, stage: nn.Module | None = None, **executor_options: Any
) -> Executor:
    """Return the executor of a pipeline of one rank, with two tensor-parallel ranks."""
    options: Results = {"sequence_parallel": True} | program_options
    program = compile(one_f_one_b, PipelineShape(1, 3), tp=2, **options)
    transport = GlooTransport(program, group=group)
    tp = transport.tp_group
    stage = stage or gpt.build_stage(
        CONFIG, 0, 1, tp=tp, sequence_parallel=program.sequence_parallel
    )
    return Executor(
        program, 0, [stage], transport,
        loss=lambda y, target: gpt.loss(y, target, tp), boundary=(2, 4, 16), **executor_options,
    )  # fmt: skip


class ReplicatedWeight(nn.Module):
    """A stage whose weight is replicated on all tensor-parallel ranks."""

    def __init__(self, is_summed: bool | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        if is_summed is not None:
            self.weight.summed_over_tp = is_summed  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


def make_sliced_weight(is_summed: bool | None) -> ReplicatedWeight:
    stage = ReplicatedWeight(is_summed)
    stage.weight.shard_dim = 0  # type: ignore[attr-defined]
    return stage


STAGE_CASES: dict[str, tuple[Results, Callable[[int], nn.Module], str]] = {
    "summed by nobody": (
        {"sequence_parallel": False},
        lambda _: ReplicatedWeight(True),
        "the program has sequence_parallel=False",
    ),
    "silent": (
        {}, lambda _: ReplicatedWeight(None), "weight of stage 0 has no attribute summed_over_tp",
    ),
    "a slice": (
        {}, lambda _: make_sliced_weight(True), "each tensor-parallel rank has a different slice",
    ),
    "of two minds": (
        {}, lambda rank: ReplicatedWeight(rank == 0),
        "parameters that tensor-parallel ranks sum in stage 0",
    ),
    "right": ({}, lambda _: ReplicatedWeight(False), ""),
    "right as a slice": ({}, lambda _: make_sliced_weight(None), ""),
    "right as ever": ({"sequence_parallel": False}, lambda _: ReplicatedWeight(None), ""),
    "nothing trained": ({}, lambda _: ReplicatedWeight(None).requires_grad_(False), ""),
}  # fmt: skip


def collect_refusals(group: Any, rank: int) -> Results:
    errors = {}
    for name, (how, make, _) in STAGE_CASES.items():
        try:
            make_executor(group, how, make(rank))
        except ModelError as error:
            errors[name] = str(error)
    return errors


TOKENS = torch.arange(18).view(2, 9) % 13
BERT_INPUTS = {"sentences": (TOKENS[:, :-1] % 3 == 0).long(), "mask": TOKENS[:, 1:] != 5}
MODELS: dict[str, tuple[Any, Any, Results, int]] = {
    "llama": (llama, LlamaConfig(vocab=13, layers=2, hidden=16, heads=4, kv_heads=2, context=8), {},
              1 + 3 + 2 * 6),
    "bert": (bert, BertConfig(vocab=13, layers=2, hidden=16, heads=2, context=8), BERT_INPUTS,
             1 + 6 + 9 + 2 * 12),
    "encoder_decoder": (
        encoder_decoder, EncoderDecoderConfig(
            vocab=13, encoder_layers=1, decoder_layers=2, hidden=16, heads=2, context=8, tied=False
        ), {"target": TOKENS[:, :4], "mask": BERT_INPUTS["mask"]}, 1 + 3 + 4 + 12 + 2 * 20,
    ),
}  # fmt: skip


def run_model(kind: str, group: Any) -> Results:
    """Return the loss and gradients of a model of two stages, summed over ranks if necessary."""
    module, config, named, _ = MODELS[kind]
    how: Results = {"tp": group, "sequence_parallel": True}
    if kind == "encoder_decoder":  # stage 0 computes and sends the encoder's output
        how["layers_per_stage"] = [2, 1]
    x: Any = (TOKENS[:, :-1],)
    stages = [module.build_stage(config, s, 2, **how) for s in range(2)]
    for stage in stages:
        x = stage(*x, **named)
        x = x if isinstance(x, tuple) else (x,)
    targets = TOKENS[:, 1:] if kind != "encoder_decoder" else TOKENS[:, 4:8]
    if kind == "bert":
        targets = targets.masked_fill(targets % 2 == 0, -1)
        targets[:, 0] = torch.tensor([0, 1])
    total = module.loss(x if kind == "bert" else x[0], targets, group)
    torch.autograd.backward(total)
    results: Results = {"loss": (total.detach(), None)}
    for stage in stages:
        results |= collect_gradients(stage, group)
    return results


def run_lengths(group: Any) -> Results:
    """Return losses and gradients for several lengths, and for one that cannot be divided."""
    tokens = [torch.arange(2 * (n + 1)).view(2, -1) % 13 for n in (8, 2, 6)]
    x, y = [t[:, :-1] for t in tokens], [t[:, 1:] for t in tokens]
    results: Results = {}
    for name, sequence in (("shared", True), ("whole", False)):
        executor = make_executor(group, {"sequence_parallel": sequence})
        total = executor.step(x, y)
        assert total is not None
        gradients = gradients_by_stage(executor)[0]
        results[name] = [total.clone(), *gradients.values()]
    try:
        make_executor(group, {}).step([t[:, :7] for t in tokens[:1]] * 3, [y[0][:, :7]] * 3)
    except Exception as error:
        results["odd"] = str(error)
    return results


def run_with_dropout(group: Any) -> Results:
    """Return the dropout masks of the rank's tokens, and the losses without and with recompute."""
    config = gpt.GPTConfig(vocab=13, layers=2, hidden=16, heads=2, context=8, dropout=0.5)
    tokens = torch.arange(18).view(2, 9) % 13
    x, y = [tokens[:, :-1]] * 3, [tokens[:, 1:]] * 3
    results: Results = {"losses": []}
    for recompute in (None, "all"):
        layer_inputs: list[Tensor] = []
        stage: Any = gpt.build_stage(config, 0, 1, tp=group, sequence_parallel=True)
        stage.layers["0"].register_forward_pre_hook(
            lambda _, given, layer_inputs=layer_inputs: layer_inputs.append(given[0])
        )
        total = make_executor(group, {"recompute": recompute}, stage).step(x, y)
        assert total is not None
        results["losses"].append([total.clone(), *(p.grad.clone() for p in stage.parameters())])
        results["masks"] = [layer_input == 0 for layer_input in layer_inputs[:3]]
    return results


def run_all_checks(rank: int) -> Results:
    torch.set_num_threads(1)
    pair, results = dist.new_group([0, 1]), Results()
    results["shapes"] = find_wrong_shapes(3, dist.group.WORLD, rank)
    if rank == 2:
        return results
    results["shapes"] += find_wrong_shapes(2, pair, rank)
    results["refused"] = collect_refusals(pair, rank)
    results["lengths"], results["drawn"] = run_lengths(pair), run_with_dropout(pair)
    results["kinds"] = {kind: run_model(kind, pair) for kind in MODELS}
    return results


@pytest.fixture(scope="module")
def results() -> list[Results]:
    return run(run_all_checks, 3)


def test_gradients_equal_one_process_for_random_shapes(results: list[Results]) -> None:
    assert [result["shapes"] for result in results] == [[], [], []]


@pytest.mark.parametrize("name", STAGE_CASES)
def test_wrong_summed_over_tp_attribute_is_refused(results: list[Results], name: str) -> None:
    errors = [result["refused"].get(name, "") for result in results[:2]]
    assert all(STAGE_CASES[name][2] in error for error in errors) and errors[0] == errors[1]
    assert bool(STAGE_CASES[name][2]) == bool(errors[0])


@pytest.mark.parametrize("kind", MODELS)
def test_model_families_equal_one_process(results: list[Results], kind: str) -> None:
    """Gradients of norms are summed over the ranks before the comparison."""
    want, parts = run_model(kind, None), [own["kinds"][kind] for own in results[:2]]
    assert len(want) == MODELS[kind][-1]
    for name, (expected, _) in want.items():
        shard_dim = parts[0][name][1]
        pair = [own[name][0] for own in parts]
        full = pair[0] if shard_dim is None else torch.cat(pair, shard_dim)[: len(expected)]
        assert shard_dim is not None or torch.equal(*pair), name
        assert (full - expected).norm() <= 1e-5 * expected.norm(), name


def test_microbatch_lengths_may_differ(results: list[Results]) -> None:
    for lengths in (result["lengths"] for result in results[:2]):
        for shared, plain in zip(lengths["shared"], lengths["whole"], strict=True):
            assert (shared - plain).norm() <= 1e-5 * plain.norm()
        message = "2 tensor-parallel ranks cannot share a sequence of 7 tokens"
        assert message in lengths["odd"]


def test_recompute_has_same_dropout_mask_per_rank(results: list[Results]) -> None:
    masks = [result["drawn"]["masks"] for result in results[:2]]
    for first_mask, second_mask in zip(*masks, strict=True):
        assert 0.3 < first_mask.float().mean() < 0.7 and not torch.equal(first_mask, second_mask)
    for result in results[:2]:
        plain, recomputed = result["drawn"]["losses"]
        assert all(map(torch.equal, plain, recomputed))
    assert torch.equal(*(result["drawn"]["losses"][0][0] for result in results[:2]))


def test_indivisible_sequence_is_refused() -> None:
    assert select_local_tokens(torch.ones(3, 2), None).shape == (3, 2)

    class Two:
        def size(self) -> int:
            return 2

        def rank(self) -> int:
            return 1

    two: Any = Two()
    assert select_local_tokens(torch.arange(4.0).view(4, 1), two).flatten().tolist() == [2, 3]
    with pytest.raises(UsageError, match="cannot share a sequence of 3 tokens evenly"):
        select_local_tokens(torch.ones(3, 2), two)


def test_training_losses_equal_one_process(config: str, tmp_path: Path) -> None:
    """Losses of training and evaluation are close to those of one process."""
    sets = ["train.steps=3", "train.evaluate_every=3", "train.evaluate_batches=1",
            "data.validation=0.2"]  # fmt: skip
    many_losses = train(config, tmp_path / "many", *sets, "pipeline.sequence_parallel=true")
    one_losses = train_in_this_process(config, tmp_path / "one", *sets)
    assert one_losses[0] > 3 and many_losses == pytest.approx(one_losses, rel=1e-5)
