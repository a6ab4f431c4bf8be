"""Runs Megatron-LM on a CPU, for tests of code that runs it.

This module, and not schedir, provides on a CPU what Megatron's schedules need of a GPU:
`torch.zeros(..., device="cuda")`, `torch.cuda.current_device()` and `torch.cuda.synchronize()`.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.cases import ALL

WIDTH = 4


def skip_without_megatron() -> None:
    """Skip the calling module if megatron-core is missing. Do not import it, which takes seconds.

    Each worker of pytest imports all modules of tests, but only one runs the tests of a module.
    """
    if find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed", allow_module_level=True)


def import_megatron() -> None:
    """Import megatron-core, without its warnings about missing optional packages.

    Megatron compiles some functions with torch.compile. Only ALL_CASES=1 compiles them: the import
    of the compiler takes five seconds, and the compilation of Megatron's loss takes another two.
    """
    if "megatron.core" in sys.modules:
        return
    compile_function = torch.compile if ALL else _return_function
    with warnings.catch_warnings(), patch.object(torch, "compile", compile_function):
        warnings.simplefilter("ignore")
        import megatron.core  # noqa: F401
    # Every optimizer imports it, also in each fork.
    import_module("torch._dynamo")

    # The garbage collector need not search the objects of the import.
    gc.collect()
    gc.freeze()


def _return_function(function: Any = None, **_: Any) -> Any:
    """Return a function as it is, in place of torch.compile."""
    return (lambda function: function) if function is None else function


class _OnCPU(TorchFunctionMode):
    """Creates on the CPU the tensors that are requested on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


@contextmanager
def initialize_megatron(ranks: int) -> Iterator[None]:
    """Initialize Megatron's pipeline of `ranks` processes in this process, without a GPU."""
    warnings.simplefilter("ignore")  # about missing optional packages
    from megatron.core import parallel_state

    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda device=None: None
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=ranks)
    with _OnCPU():
        yield


class Chunk(torch.nn.Module):
    """A stage with Megatron's interface, whose input is set before the call."""

    def __init__(self, config: Any, vp_stage: int | None, part: torch.nn.Module) -> None:
        super().__init__()
        self.config, self.vp_stage = config, vp_stage
        self.model_type = "encoder_or_decoder"
        self.part = part
        self.given: Any = None

    def set_input_tensor(self, given: Any) -> None:
        self.given = given[0]

    def forward(self, data: Any) -> Any:
        return self.part(data if self.given is None else self.given)


def make_chunks(ranks: int, parts: list[torch.nn.Module], **settings: Any) -> list[Chunk]:
    """Return the stages of a rank, in order."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    several = len(parts) > 1
    config = TransformerConfig(
        num_layers=ranks * len(parts),
        hidden_size=WIDTH,
        num_attention_heads=1,
        pipeline_model_parallel_size=ranks,
        virtual_pipeline_model_parallel_size=len(parts) if several else None,
        pipeline_dtype=torch.float32,
        finalize_model_grads_func=lambda *_, **__: None,
        **settings,
    )
    return [Chunk(config, k if several else None, part) for k, part in enumerate(parts)]
