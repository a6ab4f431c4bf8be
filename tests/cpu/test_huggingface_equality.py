"""Tests that logits, losses and gradients equal those of Hugging Face for equal weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples import bert, encoder_decoder
from schedir.models import gpt, llama
from schedir.models.language_model import IGNORE_INDEX
from schedir.training.gpt2_export import _convert_qkv
from tests.cpu import tiny_models
from tests.cpu.tiny_models import CONTEXT

transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)
Pairs = Iterator[tuple[str, Tensor]]  # a name in Hugging Face's model, and its tensor


def set_random_weights(model: nn.Module) -> None:
    """Set random weights, so that no layer is the identity."""
    numbers = torch.Generator().manual_seed(1)
    for p in model.parameters():
        p.data.copy_(torch.randn(p.shape, generator=numbers) * (0.2 if p.dim() > 1 else 0.5))
        p.data.add_(1 if p.dim() == 1 else 0)


def check_models_equal(
    model: nn.Module, reference: nn.Module, pairs: Any, losses: Any, *inputs: Any
) -> None:
    """Give both models equal weights, and check that their outputs and gradients are close.

    `losses` returns the outputs of each model, with the loss last. Gradients are compared in
    float64, because float32 sums cancel. Hugging Face's loss is float32.
    """
    set_random_weights(model)
    params = {n: p for n, p in reference.train().named_parameters() if p.requires_grad}
    expected_params = dict(pairs({n: p.detach() for n, p in model.named_parameters()}))
    assert expected_params.keys() == params.keys()
    for name, value in expected_params.items():
        assert params[name].shape == value.shape, name
        params[name].data.copy_(value)
    for limit, dtype in ((1e-5, torch.float32), (1e-6, torch.float64)):
        outputs, expected_outputs = losses(model.to(dtype), reference.to(dtype), *inputs)
        for actual, expected in (
            (a.detach(), b.detach()) for a, b in zip(outputs, expected_outputs, strict=True)
        ):
            assert expected.norm() > 0.1 and actual.shape == expected.shape
            assert (actual - expected).abs().max() <= limit * max(1, float(expected.abs().max()))
    outputs[-1].backward(), expected_outputs[-1].backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    for name, value in pairs(gradients):
        expected_gradient = params[name].grad
        assert expected_gradient is not None
        if name.endswith(("key.bias", "k_proj.bias")):  # has no effect on the softmax
            assert value.norm() < 1e-6 and expected_gradient.norm() < 1e-6
            continue
        assert (
            expected_gradient.norm() > 1e-4
            and (value - expected_gradient).norm() <= limit * expected_gradient.norm()
        ), name


def make_tokens(vocab: int, context: int) -> Tensor:
    return torch.randint(vocab, (3, context + 1), generator=torch.Generator().manual_seed(0))


def compute_causal_outputs(model: nn.Module, reference: Any, tokens: Tensor) -> tuple[Any, Any]:
    """Return the logits and summed losses of both models."""
    x, targets = tokens[:, :-1], tokens[:, 1:]
    logits, expected_logits = model(x), reference(x).logits
    expected_loss = F.cross_entropy(
        expected_logits.flatten(0, 1), targets.flatten(), reduction="sum"
    )
    return (logits, gpt.loss(logits, targets)), (expected_logits, expected_loss)


# GPT

GPT = {
    "embedding.weight": "transformer.wte.weight", "positions": "transformer.wpe.weight",
    "norm": "transformer.ln_f", "attention_norm": "ln_1", "qkv": "attn.c_attn",
    "proj": "attn.c_proj", "mlp_norm": "ln_2", "up": "mlp.c_fc", "down": "mlp.c_proj",
    "head.weight": "lm_head.weight",
}  # fmt: skip


@pytest.mark.parametrize("tied", [True, False])
def test_gpt_equals_hugging_face(tied: bool) -> None:
    config = gpt.GPTConfig(vocab=31, layers=2, hidden=24, heads=3, context=9, tied=tied)

    def pairs(parameters: dict[str, Tensor]) -> Pairs:
        for name, value in parameters.items():
            if name in GPT:
                yield GPT[name], value
                continue
            *layer, part, kind = name.split(".")
            if part == "qkv":
                value = _convert_qkv(value, config.heads)
            elif value.dim() == 2:
                value = value.t()
            prefix = f"transformer.h.{layer[1]}." if layer else ""
            yield f"{prefix}{GPT[part]}.{kind}", value

    reference = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=31, n_layer=2, n_embd=24, n_head=3, n_positions=9, bos_token_id=0,
            eos_token_id=0, activation_function="gelu", tie_word_embeddings=tied, embd_pdrop=0.0,
            attn_pdrop=0.0, resid_pdrop=0.0,
        )
    )  # fmt: skip
    check_models_equal(
        gpt.build_stage(config, 0, 1), reference, pairs, compute_causal_outputs, make_tokens(31, 9)
    )


# Llama

ATTENTION = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
LLAMA = {
    "embedding.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight", "proj": "self_attn.o_proj", "down": "mlp.down_proj",
} | ATTENTION  # fmt: skip


@pytest.mark.parametrize(
    ("tied", "kv_heads", "window"), [(True, 2, 0), (False, 1, 0), (False, 4, 0), (False, 2, 3)]
)
def test_llama_and_mistral_equal_hugging_face(tied: bool, kv_heads: int, window: int) -> None:
    """A model with an attention window is compared with Mistral."""
    config = llama.LlamaConfig(
        vocab=31, layers=2, hidden=24, heads=4, kv_heads=kv_heads, context=9, tied=tied, theta=50.0,
        window=window,
    )  # fmt: skip
    queries = config.heads // kv_heads

    def pairs(parameters: dict[str, Tensor]) -> Pairs:
        for name, value in parameters.items():
            if name in LLAMA:
                yield LLAMA[name], value
                continue
            _, number, part, _ = name.split(".")
            prefix = f"model.layers.{number}"
            if part == "qkv":
                parts = value.view(kv_heads, queries + 2, -1, config.hidden)
                for letter, block in zip("qkv", parts.split((queries, 1, 1), 1), strict=True):
                    yield f"{prefix}.self_attn.{letter}_proj.weight", block.flatten(0, 2)
            elif part == "gate_up":
                for k, kind in enumerate(("gate", "up")):
                    yield f"{prefix}.mlp.{kind}_proj.weight", value[k::2]
            else:
                yield f"{prefix}.{LLAMA[part]}.weight", value

    name = "Mistral" if window else "Llama"
    reference = getattr(transformers, f"{name}ForCausalLM")(
        getattr(transformers, f"{name}Config")(
            vocab_size=31, num_hidden_layers=2, hidden_size=24, num_attention_heads=4,
            num_key_value_heads=kv_heads, intermediate_size=config.ffn_width,
            rms_norm_eps=config.eps,
            max_position_embeddings=9, tie_word_embeddings=tied,
            rope_parameters={"rope_type": "default", "rope_theta": 50.0},
            **({"sliding_window": window} if window else {}),
        )
    )  # fmt: skip
    stage = llama.build_stage(config, 0, 1)
    assert config.num_parameters == sum(p.numel() for p in stage.parameters())
    check_models_equal(stage, reference, pairs, compute_causal_outputs, make_tokens(31, 9))


# BERT

MEGATRON_BERT = {
    "embedding.weight": "bert.embeddings.word_embeddings.weight",
    "positions": "bert.embeddings.position_embeddings.weight",
    "sentences": "bert.embeddings.token_type_embeddings.weight",
    "heads.bias": "cls.predictions.bias",
    "norm": "bert.encoder.ln",
    "heads.token": "cls.predictions.transform.dense",
    "heads.norm": "cls.predictions.transform.LayerNorm",
    "heads.pool": "bert.pooler.dense",
    "heads.follows": "cls.seq_relationship",
    "attention.norm": "attention.ln",
    "attention.proj": "attention.output.dense",
    "feed_forward.norm": "ln",
    "feed_forward.up": "intermediate.dense",
    "feed_forward.down": "output.dense",
}


def test_bert_equals_hugging_face() -> None:
    config = bert.BertConfig(vocab=31, layers=2, hidden=24, heads=3, context=CONTEXT)
    batch = tiny_models.make_sentence_pairs(config, 2, 0)
    tokens, targets = (torch.cat([*tensors]) for tensors in batch[:2])
    sentences, mask = (
        torch.cat([keyword[name] for keyword in batch.keywords]) for name in ("sentences", "mask")
    )

    def pairs(parameters: dict[str, Tensor]) -> Pairs:
        for name, value in parameters.items():
            if name in MEGATRON_BERT:
                yield MEGATRON_BERT[name], value
                continue
            part, _, kind = name.rpartition(".")
            prefix = ""
            if part.startswith("layers."):
                _, number, part = part.split(".", 2)
                prefix = f"bert.encoder.layer.{number}."
            if part == "attention.qkv":
                parts = value.view(config.heads, 3, -1, *value.shape[1:]).unbind(1)
                for target, tensors in zip(("query", "key", "value"), parts, strict=True):
                    yield f"{prefix}attention.self.{target}.{kind}", tensors.flatten(0, 1)
            else:
                yield f"{prefix}{MEGATRON_BERT[part]}.{kind}", value

    def losses(model: nn.Module, reference: Any) -> tuple[Any, Any]:
        outputs = model(tokens, sentences=sentences, mask=mask)
        mean = bert.loss(outputs, targets) / bert.count_tokens(targets)
        labels = targets.masked_fill(targets == IGNORE_INDEX, -100)
        labels[:, 0] = -100
        expected_outputs = reference(
            tokens, mask.long(), sentences, labels=labels, next_sentence_label=targets[:, 0]
        )
        return (*outputs, mean), (
            expected_outputs.prediction_logits,
            expected_outputs.seq_relationship_logits,
            expected_outputs.loss,
        )

    reference = transformers.MegatronBertForPreTraining(
        transformers.MegatronBertConfig(
            vocab_size=31, num_hidden_layers=2, hidden_size=24, num_attention_heads=3,
            intermediate_size=96, max_position_embeddings=CONTEXT, layer_norm_eps=1e-5,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=config.pad,
            tie_word_embeddings=True,
        )
    )  # fmt: skip
    stage = bert.build_stage(config, 0, 1)
    check_models_equal(stage, reference, pairs, losses)


# Encoder and decoder

PEGASUS = {
    "encoder_norm": "model.encoder.layer_norm", "norm": "model.decoder.layer_norm",
    "attention.norm": "self_attn_layer_norm", "attention.proj": "self_attn.out_proj",
    "across.norm": "encoder_attn_layer_norm", "across.proj": "encoder_attn.out_proj",
    "across.q": "encoder_attn.q_proj", "feed_forward.norm": "final_layer_norm",
    "feed_forward.up": "fc1", "feed_forward.down": "fc2",
}  # fmt: skip


def test_encoder_decoder_equals_hugging_face() -> None:
    config = encoder_decoder.EncoderDecoderConfig(
        vocab=31, encoder_layers=2, decoder_layers=2, hidden=24, heads=3, context=9
    )
    batch = tiny_models.make_translations(2, 0)
    source, targets = (torch.cat([*tensors]) for tensors in batch[:2])
    decoder_input, mask = (
        torch.cat([tensors[name] for tensors in batch.keywords]) for name in ("target", "mask")
    )

    def pairs(parameters: dict[str, Tensor]) -> Pairs:
        for name, value in parameters.items():
            part, _, kind = name.rpartition(".")
            if part == "embedding":
                yield "model.shared.weight", value
                continue
            prefix = ""
            if part not in PEGASUS:
                half, number, part = part.split(".", 2)
                first = config.encoder_layers if half == "decoder" else 0
                prefix = f"model.{half}.layers.{int(number) - first}."
            letters = {"attention.qkv": "qkv", "across.kv": "kv"}.get(part)
            if letters is None:
                yield f"{prefix}{PEGASUS[part]}.{kind}", value
                continue
            attention = "self_attn" if part == "attention.qkv" else "encoder_attn"
            parts = value.view(config.heads, len(letters), -1, *value.shape[1:]).unbind(1)
            for letter, block in zip(letters, parts, strict=True):
                yield f"{prefix}{attention}.{letter}_proj.{kind}", block.flatten(0, 1)

    def losses(model: nn.Module, reference: Any) -> tuple[Any, Any]:
        outputs = model(source, target=decoder_input, mask=mask)
        labels = targets.masked_fill(targets == gpt.IGNORE_INDEX, -100)
        expected_outputs = reference(source, mask.long(), decoder_input, labels=labels)
        mean = gpt.loss(outputs, targets) / gpt.count_tokens(targets)
        return (outputs, mean), (expected_outputs.logits, expected_outputs.loss)

    reference = transformers.PegasusForConditionalGeneration(
        transformers.PegasusConfig(
            vocab_size=31, encoder_layers=2, decoder_layers=2, d_model=24, encoder_ffn_dim=96,
            decoder_ffn_dim=96, encoder_attention_heads=3, decoder_attention_heads=3,
            max_position_embeddings=9, scale_embedding=True, dropout=0.0, attention_dropout=0.0,
            activation_function="gelu", pad_token_id=30, decoder_start_token_id=0,
            eos_token_id=1, tie_word_embeddings=True,
        )
    )  # fmt: skip
    for name in ("encoder", "decoder"):
        table = getattr(reference.model, name).embed_positions.weight
        assert (table - encoder_decoder.waves(9, table)).abs().max() < 1e-6
    stage = encoder_decoder.build_stage(config, 0, 1)
    check_models_equal(stage, reference, pairs, losses)
