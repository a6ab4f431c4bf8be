"""Tests that Hugging Face models, cut into stages, are bitwise equal to the whole model."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch

from schedir import find_tied_weights
from schedir.errors import UsageError
from schedir.models.huggingface import cut
from tests.cases import each_value
from tests.cpu.train_command import ROOT, run_in_forks

transformers = pytest.importorskip("transformers")

LAYERS = 5
SMALL: dict[str, Any] = dict(
    num_hidden_layers=LAYERS, hidden_size=32, intermediate_size=64, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=96, max_position_embeddings=64,
)  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("GemmaForCausalLM", {"head_dim": 8}),
    "gpt2": ("GPT2LMHeadModel", {"n_positions": 64, "bos_token_id": 0, "eos_token_id": 0}),
    "llama": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 4}),
    "qwen2": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
    ),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16}),
}


def build_model(kind: str, **changes: Any) -> Any:
    class_name, model_options = MODELS[kind]
    torch.manual_seed(0)
    model_class = getattr(transformers, class_name)
    return model_class(model_class.config_class(**{**SMALL, **model_options, **changes})).train()


def run_step(apply: Any, model: Any, tokens: torch.Tensor, **keywords: Any) -> list[torch.Tensor]:
    """Return the logits and then the gradients of all parameters, in the order of the model."""
    torch.manual_seed(1)  # for dropout
    model.zero_grad()
    logits = apply(tokens, **keywords)
    logits.float().square().mean().backward()
    return [logits.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize(
    ("kind", "dtype"), each_value([*MODELS], [torch.float32, torch.bfloat16]), ids=str
)
def test_stages_equal_whole_model(kind: str, dtype: torch.dtype) -> None:
    """The cases include sliding windows, dropout, padding, positions and recomputation."""
    model = build_model(kind).to(dtype)
    stages = cut(model, 3, (1, 3, 1))
    tokens = torch.randint(96, (2, 12))
    padded = torch.ones_like(tokens)
    padded[1, :4] = 0

    def run_stages(x: torch.Tensor, **keywords: Any) -> torch.Tensor:
        for stage in stages:
            x = stage(x, **keywords)
        return x

    positions = torch.randint(1, 3, (2, 1)) * torch.arange(12)
    for keywords in ({}, {"attention_mask": padded}, {"position_ids": positions}):
        expected = run_step(
            lambda x, **k: model(x, use_cache=False, **k).logits, model, tokens, **keywords
        )
        actual = run_step(run_stages, model, tokens, **keywords)
        assert all(map(torch.equal, actual, expected)), keywords
    model.activation_checkpointing_enable()
    assert all(map(torch.equal, run_step(run_stages, model, tokens), run_step(
        lambda x: model(x, use_cache=False).logits, model, tokens
    )))  # fmt: skip


@pytest.mark.parametrize("kind", MODELS)
def test_parameters_keep_names_of_model(kind: str) -> None:
    model = build_model(kind)
    stages = cut(model, LAYERS)
    model_parameters = dict(model.named_parameters(remove_duplicate=False))
    stage_parameters: dict[str, Any] = {}
    for stage in stages:
        stage_parameters |= dict(stage.named_parameters(remove_duplicate=False))
    assert stage_parameters.keys() == model_parameters.keys()
    assert all(stage_parameters[name] is model_parameters[name] for name in model_parameters)
    assert bool(find_tied_weights(stages)) == model.config.tie_word_embeddings
    assert model.config.num_hidden_layers == LAYERS


@pytest.mark.parametrize("kind", MODELS)
def test_attention_implementation_may_change_after_cut(kind: str) -> None:
    """The masks follow the current attention of the layers. A deep copy keeps its attention."""
    model = build_model(kind).eval()
    copied_stages, tokens = copy.deepcopy(cut(model, LAYERS)), torch.randint(96, (2, 12))
    shared_stages = cut(model, LAYERS)
    before = model(tokens, use_cache=False).logits
    model.set_attn_implementation("eager")
    after = model(tokens, use_cache=False).logits
    for stages, expected in ((copied_stages, before), (shared_stages, after)):
        x = tokens
        for stage in stages:
            x = stage(x)
        assert torch.equal(x, expected)
    with pytest.raises(UsageError, match="does not support the keyword labels"):
        copied_stages[0](tokens, labels=tokens)


def test_model_with_unused_parts_is_refused() -> None:
    model = build_model("llama")
    model.config.num_hidden_layers = 3
    with pytest.raises(UsageError, match="has 5 layers, and its num_hidden_layers is 3"):
        cut(model, 3)
    model = build_model("llama")
    model.model.forward = model.model.forward  # Hooks of accelerate do this.
    with pytest.raises(UsageError, match="cannot use LlamaModel, because its forward was"):
        cut(model, 5)
    config = transformers.GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=96)
    with pytest.raises(UsageError, match=r"GPT2DoubleHeadsModel: .*multiple_choice_head"):
        cut(transformers.GPT2DoubleHeadsModel(config), 2)


def test_unsupported_models_and_divisions_are_refused() -> None:
    model = build_model("llama")
    with pytest.raises(UsageError, match="cut does not support models of type 'bert'"):
        cut(transformers.BertModel(transformers.BertConfig(num_hidden_layers=1)), 1)
    with pytest.raises(UsageError, match="cut does not support models of type None"):
        cut(torch.nn.Linear(2, 2), 2)
    with pytest.raises(UsageError, match="needs a causal language model, not LlamaModel"):
        cut(model.model, 2)
    with pytest.raises(UsageError, match="5 layers"):
        cut(model, 2)
    with pytest.raises(UsageError, match="a stage without layers"):
        cut(model, 3, (0, 3, 2))


def test_scripts_of_documentation_page_print_same_loss() -> None:
    """The second script runs in torch's pipeline, and begins like the first one."""
    page = (ROOT / "docs/how-to/cut-a-hugging-face-model.md").read_text()
    first, second = (block.split("```")[0] for block in page.split("```python\n")[1:3])
    names: dict[str, Any] = {"print": lambda loss: losses.append(float(loss))}
    losses: list[float] = []
    exec(compile(first, "page", "exec"), names)
    assert all(p.grad is not None for p in names["model"].parameters())
    beginning = first[: first.index("program = ")]
    script = compile(beginning + second, "page", "exec")
    losses += map(float, run_in_forks(partial(exec, script, {"__name__": "__main__"}), 2).split())
    assert len(losses) == 2 and losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert f"prints about {losses[0]:.1f}" in page


def test_lora_stages_equal_whole_model() -> None:
    """Stages contain the adapters."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        build_model("llama"), peft.LoraConfig(target_modules=["q_proj"], r=2)
    )
    stages, tokens = cut(model.get_base_model(), LAYERS), torch.randint(96, (2, 12))

    def compute_gradients(logits: torch.Tensor) -> list[torch.Tensor]:
        model.zero_grad()
        logits.square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.requires_grad]

    expected = compute_gradients(model(tokens, use_cache=False).logits)
    x = tokens
    for stage in stages:
        x = stage(x)
    assert all(map(torch.equal, compute_gradients(x), expected)) and len(expected) == 2 * LAYERS
