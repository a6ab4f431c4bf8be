"""Models beside the same of Hugging Face: equal logits, losses and gradients of equal weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from schedir.models import llama
from schedir.training import gpt
from schedir.training.as_gpt2 import _qkv

transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)
Pairs = Iterator[tuple[str, Tensor]]  # a name there, and the tensor as it is there
LIMIT = 1e-5


def random_weights(model: nn.Module) -> None:
    """Numbers that none of its parts would leave as they are."""
    numbers = torch.Generator().manual_seed(1)
    for p in model.parameters():
        p.data.copy_(torch.randn(p.shape, generator=numbers) * (0.2 if p.dim() > 1 else 0.5))
        p.data.add_(1 if p.dim() == 1 else 0)


def compare(ours: nn.Module, theirs: nn.Module, pairs: Any, losses: Any, tokens: Any) -> None:
    """Give both the same weights; `losses` gives what each makes and the loss.  All is close."""
    random_weights(ours)
    params = dict(theirs.named_parameters())
    there = dict(pairs({n: p.detach() for n, p in ours.named_parameters()}))
    assert there.keys() == params.keys()
    for name, value in there.items():
        assert params[name].shape == value.shape, name
        params[name].data.copy_(value)
    made, found = losses(ours, theirs.train(), *tokens)
    for mine, yours in ((a.detach(), b.detach()) for a, b in zip(made, found, strict=True)):
        assert yours.norm() > 0.1 and mine.shape == yours.shape
        assert (mine - yours).abs().max() <= LIMIT * max(1, float(yours.abs().max()))
    made[-1].backward(), found[-1].backward()
    gradients = {n: p.grad for n, p in ours.named_parameters()}
    for name, value in pairs(gradients):
        due = params[name].grad
        assert due is not None and due.norm() > 1e-4, name
        assert (value - due).norm() <= LIMIT * due.norm(), name


def next_tokens(vocab: int, context: int) -> Tensor:
    return torch.randint(vocab, (3, context + 1), generator=torch.Generator().manual_seed(0))


def causal(ours: nn.Module, theirs: Any, tokens: Tensor) -> tuple[Any, Any]:
    """Logits and summed losses of both."""
    x, targets = tokens[:, :-1], tokens[:, 1:]
    mine, yours = ours(x), theirs(x).logits
    right = F.cross_entropy(yours.flatten(0, 1), targets.flatten(), reduction="sum")
    return (mine, gpt.loss(mine, targets)), (yours, right)


# GPT

GPT = {
    "embedding.weight": "transformer.wte.weight", "positions": "transformer.wpe.weight",
    "norm": "transformer.ln_f", "attention_norm": "ln_1", "qkv": "attn.c_attn",
    "proj": "attn.c_proj", "mlp_norm": "ln_2", "up": "mlp.c_fc", "down": "mlp.c_proj",
    "head.weight": "lm_head.weight",
}  # fmt: skip


@pytest.mark.parametrize("tied", [True, False])
def test_gpt(tied: bool) -> None:
    config = gpt.GPTConfig(vocab=31, layers=2, hidden=24, heads=3, context=9, tied=tied)

    def pairs(own: dict[str, Tensor]) -> Pairs:
        for name, value in own.items():
            if name in GPT:
                yield GPT[name], value
                continue
            *layer, part, what = name.split(".")
            if part == "qkv":
                value = _qkv(value, config.heads)
            elif value.dim() == 2:
                value = value.t()
            where = f"transformer.h.{layer[1]}." if layer else ""
            yield f"{where}{GPT[part]}.{what}", value

    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=31, n_layer=2, n_embd=24, n_head=3, n_positions=9, bos_token_id=0,
            eos_token_id=0, activation_function="gelu", tie_word_embeddings=tied, embd_pdrop=0.0,
            attn_pdrop=0.0, resid_pdrop=0.0,
        )
    )  # fmt: skip
    compare(gpt.build_stage(config, 0, 1), theirs, pairs, causal, [next_tokens(31, 9)])


# Llama

ATTENTION = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
LLAMA = {
    "embedding.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight", "proj": "self_attn.o_proj", "down": "mlp.down_proj",
} | ATTENTION  # fmt: skip


@pytest.mark.parametrize(("tied", "kv_heads"), [(True, 2), (False, 1), (False, 4)])
def test_llama(tied: bool, kv_heads: int) -> None:
    config = llama.LlamaConfig(
        vocab=31, layers=2, hidden=24, heads=4, kv_heads=kv_heads, context=9, tied=tied, theta=50.0
    )
    queries = config.heads // kv_heads

    def pairs(own: dict[str, Tensor]) -> Pairs:
        for name, value in own.items():
            if name in LLAMA:
                yield LLAMA[name], value
                continue
            _, number, part, _ = name.split(".")
            where = f"model.layers.{number}"
            if part == "qkv":
                parts = value.view(kv_heads, queries + 2, -1, config.hidden)
                for letter, one in zip("qkv", parts.split((queries, 1, 1), 1), strict=True):
                    yield f"{where}.self_attn.{letter}_proj.weight", one.flatten(0, 2)
            elif part == "gate_up":
                for k, what in enumerate(("gate", "up")):
                    yield f"{where}.mlp.{what}_proj.weight", value[k::2]
            else:
                yield f"{where}.{LLAMA[part]}.weight", value

    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=31, num_hidden_layers=2, hidden_size=24, num_attention_heads=4,
            num_key_value_heads=kv_heads, intermediate_size=config.width, rms_norm_eps=config.eps,
            max_position_embeddings=9, tie_word_embeddings=tied,
            rope_parameters={"rope_type": "default", "rope_theta": 50.0},
        )
    )  # fmt: skip
    stage = llama.build_stage(config, 0, 1)
    assert config.parameters == sum(p.numel() for p in stage.parameters())
    compare(stage, theirs, pairs, causal, [next_tokens(31, 9)])
