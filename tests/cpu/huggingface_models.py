"""Hugging Face models in stages, and a comparison of pipeline steps with one process."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from schedir.models import huggingface
from tests.cpu.torch_pipelines import make_stage

ROOT = Path(__file__).parents[2]
RANKS, LAYERS, MICROBATCHES, SIZE, CONTEXT, WORDS = 2, 4, 4, 2, 12, 96
TIED = {
    "gpt2": "transformer.wte.weight",
    "llama": "model.embed_tokens.weight",
    "keywords": "model.embed_tokens.weight",
}


class WholeModelRun(NamedTuple):
    """A model, a batch for it, and the losses and gradients of a plain loop over microbatches."""

    model: Any
    tokens: Tensor
    keywords: dict[str, Tensor]
    targets: Tensor
    losses: Tensor
    logits: Tensor
    due: dict[str, Tensor]


class RankResults(NamedTuple):
    """The results of a step on a rank.

    `off` has the error of each gradient by name, and `same` the names of gradients with equal bits.
    The rank of the last stage also has the losses and the logits.
    """

    off: dict[str, float]
    same: set[str]
    losses: Tensor | None
    logits: Tensor | None


def loss_fn(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


@cache
def run_whole_model(kind: str) -> WholeModelRun:
    torch.manual_seed(0)
    model = (
        make_gpt2() if kind == "gpt2" else make_llama("sdpa" if kind == "keywords" else "eager")
    ).train()
    sequences = torch.randint(WORDS, (MICROBATCHES * SIZE, CONTEXT + 1))
    tokens, targets = sequences[:, :-1], sequences[:, 1:]
    keywords = {}
    if kind == "keywords":  # each sequence has its own distances
        steps = torch.randint(1, 4, (len(tokens), 1))
        keywords["position_ids"] = steps * torch.arange(CONTEXT)
    losses, logits = [], []
    alone: Any = WithPositions(model, 0, 1) if keywords else lambda x: model(x).logits
    for k, (x, y) in enumerate(zip(*map(split_batch, (tokens, targets)), strict=True)):
        logits.append(alone(x, **{name: split_batch(each)[k] for name, each in keywords.items()}))
        losses.append(loss_fn(logits[-1], y))
        losses[-1].backward()
    due = {name: p.grad / MICROBATCHES for name, p in model.named_parameters()}
    model.zero_grad()
    return WholeModelRun(
        model, tokens, keywords, targets, torch.stack(losses).detach(), torch.cat(logits).detach(),
        due,
    )  # fmt: skip


def split_batch(batch: Tensor) -> Sequence[Tensor]:
    return batch.chunk(MICROBATCHES)


def make_gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=LAYERS, n_embd=32, n_head=4, vocab_size=WORDS, n_positions=CONTEXT,
        bos_token_id=0, eos_token_id=0, use_cache=False,
        embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def make_llama(attention: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=LAYERS, hidden_size=32, intermediate_size=64, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=WORDS, max_position_embeddings=64,
        tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    config._attn_implementation = attention
    return LlamaForCausalLM(config)


class WithPositions(nn.Module):
    """Some of Llama's layers, where each stage gets the positions and computes its own tables."""

    def __init__(self, model: Any, number: int, stages: int) -> None:
        super().__init__()
        inner, each = model.model, LAYERS // stages
        self.layers = inner.layers[number * each : (number + 1) * each]
        self.rotary = inner.rotary_emb
        self.embedding = inner.embed_tokens if number == 0 else None
        self.head: nn.Module | None = None
        if number == stages - 1:
            self.head = nn.Sequential(inner.norm, model.lm_head)

    def forward(self, x: Tensor, *, position_ids: Tensor) -> Tensor:
        x = x if self.embedding is None else self.embedding(x)
        tables = self.rotary(x, position_ids)
        for layer in self.layers:
            x = layer(x, position_ids=position_ids, position_embeddings=tables)
        return x if self.head is None else self.head(x)


class FiveTensors(nn.Module):
    """Some of Llama's layers; five tensors pass to the next stage, and only one has a gradient.

    The others are a mask, positions, which are integers, and two rotary tables.
    """

    def __init__(self, model: Any, number: int, stages: int) -> None:
        super().__init__()
        inner, each = model.model, len(model.model.layers) // stages
        self.config = model.config
        self.layers = inner.layers[number * each : (number + 1) * each]
        self.first, self.last = number == 0, number == stages - 1
        if self.first:
            self.embedding, self.rotary = inner.embed_tokens, inner.rotary_emb
        if self.last:
            self.norm, self.head = inner.norm, model.lm_head

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        places: Tensor | None = None,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
    ) -> Tensor | tuple[Tensor | None, ...]:
        """Turn tokens, or the previous stage's output, into input for the next stage or logits."""
        from transformers.masking_utils import create_causal_mask

        if self.first:
            places = torch.arange(x.shape[1], device=x.device).repeat(len(x), 1)
            x = self.embedding(x)
            cos, sin = self.rotary(x, places)
            mask = create_causal_mask(self.config, x, None, None, position_ids=places)
        for layer in self.layers:
            x = layer(x, attention_mask=mask, position_ids=places, position_embeddings=(cos, sin))
        return self.head(self.norm(x)) if self.last else (x, mask, places, cos, sin)


@cache
def load_example_function(name: str) -> Any:
    """Return a function of the example, which trains a smaller model on fewer ranks."""
    function = runpy.run_path(str(ROOT / "examples/torch_drop_in.py"))[name]
    settings = function.__globals__
    settings |= {"RANKS": RANKS, "STAGES": LAYERS, "MICROBATCHES": MICROBATCHES}
    settings["CONFIG"].num_hidden_layers = LAYERS
    return function


def get_stage_factory(kind: str) -> Callable[[Any, int, int], nn.Module]:
    """Return the function that creates a stage of a model."""
    if kind == "gpt2":
        return lambda model, number, stages: huggingface.cut(model, stages)[number]
    return WithPositions if kind == "keywords" else FiveTensors


@cache
def make_tied_group() -> Any:
    """Return a group of the ranks with copies of a tied weight, for stages placed in a loop."""
    return dist.new_group([0, RANKS - 1])


class Pipeline:
    """The stages of a rank, and the schedule that `build` returns for them."""

    def __init__(
        self, kind: str, own: Sequence[int], stages: int, build: Callable[[list[Any]], Any]
    ) -> None:
        self.kind, self.case = kind, run_whole_model(kind)
        self.parts = {s: get_stage_factory(kind)(self.case.model, s, stages) for s in own}
        self.first, self.last = 0 in own, stages - 1 in own
        self.schedule = build([make_stage(part, s, stages) for s, part in self.parts.items()])

    def run(self, what: str = "step", by_hand: bool = True) -> RankResults:
        """Run a step or `eval`, and clear the gradients.

        The gradients of the tied copies are summed by hand, as torch's users do, or by the
        schedule.
        """
        model, losses = self.case.model, list[Tensor]()
        output = getattr(self.schedule, what)(
            *((self.case.tokens,) if self.first else ()),
            target=self.case.targets if self.last else None,
            losses=losses if self.last else None,
            **self.case.keywords,
        )
        names = {p: name for name, p in model.named_parameters()}
        own = {p for part in self.parts.values() for p in part.parameters()}
        got = {names[p]: p.grad for p in own if p.grad is not None}
        tied, both = TIED[self.kind], make_tied_group()
        if by_hand and what == "step" and self.first != self.last:
            dist.all_reduce(got[tied], group=both)
        model.zero_grad()
        off = {name: relative_distance(g, self.case.due[name]) for name, g in got.items()}
        same = {name for name, g in got.items() if torch.equal(g, self.case.due[name])}
        return RankResults(
            off, same, torch.stack(losses).detach() if self.last else None,
            None if output is None else output.detach(),
        )  # fmt: skip


def relative_distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())
