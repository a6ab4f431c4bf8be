"""Export a trained GPT as a GPT-2 model of Hugging Face's `transformers`.

Both models compute the same function: pre-LayerNorm, learned positions, exact GELU (with erf), and
a head without bias. The parameters have other names, and `transformers` stores linear weights
transposed (Conv1D). In schedir, the rows of the weight `qkv` have the order (head, qkv, width). In
`transformers`, its columns have the order (qkv, head, width).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from schedir.checkpoints.manifest import Manifest, TensorMeta
from schedir.checkpoints.safetensors_export import ExportedTensor
from schedir.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

_TOP_LEVEL_NAMES: Final = {
    "embedding.weight": "transformer.wte.weight",
    "positions": "transformer.wpe.weight",
    "norm.weight": "transformer.ln_f.weight",
    "norm.bias": "transformer.ln_f.bias",
    "head.weight": "lm_head.weight",
}
_LAYER_NAMES: Final = {
    "attention_norm": "ln_1",
    "qkv": "attn.c_attn",
    "proj": "attn.c_proj",
    "mlp_norm": "ln_2",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}
_LAYER_PATTERN: Final = re.compile(r"layers\.(\d+)\.(\w+)\.(weight|bias)")


def convert_to_gpt2(
    manifest: Manifest, tensors: Sequence[ExportedTensor]
) -> tuple[dict[str, Any], list[ExportedTensor]]:
    """Return the `config.json` and the tensors of a checkpoint as `transformers` expects them.

    The sizes come from the shapes of the tensors. The number of heads comes from the settings of
    `schedir train` in the manifest.

    Args:
        manifest: The manifest of the checkpoint.
        tensors: The tensors of the checkpoint.

    Returns:
        The contents of `config.json`, and the tensors with the names and layouts of GPT-2.

    Raises:
        CheckpointError: The checkpoint is not a GPT of `schedir train`, or a layer has an attention
            window that is shorter than the context.
    """
    kinds = {tensor.name: tensor.meta.shape for tensor in tensors}
    heads = _read_setting(manifest, "heads", int)
    if (kind := _read_setting(manifest, "kind", str, "gpt")) != "gpt":
        raise _make_gpt_error(manifest, f"it is of kind {kind}")
    dropout = _read_setting(manifest, "dropout", float)
    try:
        (vocab, hidden), (context, _) = kinds["embedding.weight"], kinds["positions"]
    except (KeyError, ValueError):
        raise _make_gpt_error(manifest, "it has no embedding of tokens and of positions") from None
    numbers = (int(match[1]) for match in map(_LAYER_PATTERN.fullmatch, kinds) if match)
    layers = 1 + max(numbers, default=-1)
    expected = _get_expected_shapes(vocab, hidden, context, min(layers, len(kinds)))
    tied = "head.weight" not in kinds
    if tied:
        del expected["head.weight"]
    if odd := [*expected.keys() - kinds.keys()]:
        raise _make_gpt_error(manifest, f"it has no tensor {min(odd)}")
    if odd := [*kinds.keys() - expected.keys()]:
        raise _make_gpt_error(manifest, f"it has an unknown tensor {min(odd)}")
    if odd := [name for name in kinds if kinds[name] != expected[name]]:
        name = odd[0]
        shapes = f"the shape {[*kinds[name]]}, not {[*expected[name]]}"
        raise _make_gpt_error(manifest, f"tensor {name} has {shapes}")
    if heads < 1 or hidden % heads:
        raise _make_gpt_error(manifest, f"{heads} heads do not divide a hidden width of {hidden}")
    if windows := [
        size
        for size in _read_setting(manifest, "window", _parse_integers, "0")
        if 0 < size < context
    ]:
        raise _make_gpt_error(
            manifest, f"a layer has an attention window of {max(windows)}, but GPT-2 has none"
        )
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": vocab,
        "n_positions": context,
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": heads,
        "n_inner": None,
        "activation_function": "gelu",
        "layer_norm_epsilon": 1e-5,
        **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), dropout),
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": next(tensor.meta.dtype for tensor in tensors),
    }
    return config, [_rename_tensor(tensor, heads) for tensor in tensors]


def _get_expected_shapes(
    vocab: int, hidden: int, context: int, layers: int
) -> dict[str, tuple[int, ...]]:
    size_factors = {"qkv": (3, 1), "proj": (1, 1), "up": (4, 1), "down": (1, 4)}
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.weight": (vocab, hidden),
        "positions": (context, hidden),
        "norm.weight": (hidden,),
        "norm.bias": (hidden,),
        "head.weight": (vocab, hidden),
    }
    for number in range(layers):
        for part in _LAYER_NAMES:
            rows, columns = size_factors.get(part, (1, 0))
            weight = (rows * hidden, columns * hidden) if columns else (hidden,)
            shapes[f"layers.{number}.{part}.weight"] = weight
            shapes[f"layers.{number}.{part}.bias"] = (rows * hidden,)
    return shapes


def _rename_tensor(tensor: ExportedTensor, heads: int) -> ExportedTensor:
    """Return a tensor with the name and the layout of GPT-2."""
    if tensor.name in _TOP_LEVEL_NAMES:
        return tensor._replace(name=_TOP_LEVEL_NAMES[tensor.name])
    match = _LAYER_PATTERN.fullmatch(tensor.name)
    assert match is not None
    number, part, parameter = match.groups()
    convert: Callable[[Tensor], Tensor] = tensor.convert
    if part == "qkv":
        convert = partial(_convert_qkv, heads=heads)
    elif parameter == "weight" and len(tensor.meta.shape) == 2:
        convert = _transpose
    shape = tensor.meta.shape[::-1]
    name = f"transformer.h.{number}.{_LAYER_NAMES[part]}.{parameter}"
    return ExportedTensor(name, TensorMeta(shape, tensor.meta.dtype), tensor.stored_name, convert)


def _transpose(value: Tensor) -> Tensor:
    return value.t()


def _convert_qkv(value: Tensor, heads: int) -> Tensor:
    """Convert rows in the order (head, qkv, width) to columns in the order (qkv, head, width)."""
    rows, *columns = value.shape
    parts = value.view(heads, 3, rows // (3 * heads), *columns).transpose(0, 1)
    return parts.reshape(rows, *columns).t()


def _parse_integers(text: str) -> list[int]:
    """Parse one integer, or a tuple of integers."""
    return [int(item) for item in text.strip("()").split(",") if item.strip()]


def _read_setting(
    manifest: Manifest, name: str, read: Callable[[str], Any], default: str | None = None
) -> Any:
    """Return a setting of the model, as `schedir train` stored it in the manifest."""
    extra = manifest.state.get("extra")
    settings = extra.get("settings") if isinstance(extra, Mapping) else None
    text = settings.get(f"model.{name}", default) if isinstance(settings, Mapping) else None
    try:
        return read(str(text))
    except ValueError:
        problem = "no" if text is None else f"an invalid value {str(text)!r:.40} of"
        raise _make_gpt_error(manifest, f"its manifest has {problem} model.{name}") from None


def _make_gpt_error(manifest: Manifest, reason: str) -> CheckpointError:
    return CheckpointError(
        f"the model in the checkpoint of step {manifest.step} is not a GPT of schedir train: "
        f"{reason}",
        step=manifest.step,
        hint="leave out --as transformers to export any model",
    )
