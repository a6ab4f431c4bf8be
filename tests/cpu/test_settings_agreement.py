"""Tests that processes compare settings before a difference causes a hang or wrong results."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from torch import nn

from schedir import compile
from schedir.errors import ModelError
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.models import gpt
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.executor import Executor
from schedir.runtime.executor_options import GradientOptions
from schedir.runtime.parameters.mixed_precision import LossScale, use_float32_gradients
from schedir.schedules import one_f_one_b
from schedir.training.batches.text_batches import Corpus
from schedir.training.config.run_config import Config, PipelineConfig
from schedir.training.train import build_program
from schedir.training.trainer import _Trainer
from schedir.transports import process_transport
from schedir.transports.gloo import GlooTransport
from schedir.transports.json_collectives import find_difference, select_exchange_device
from schedir.transports.p2p_groups import EdgeGroups
from tests.cpu.gloo_processes import RankError, run
from tests.cpu.tiny_stages import BOUNDARY, gpt_stages


def _build_executor(process: int, differs: str) -> None:
    """Build the executor of one of two ranks or replicas. Process 1 has another setting."""
    is_different = process == 1
    replicas = differs in ("hidden", "gradients", "turned", "order", "fewer")
    shape = PipelineShape(1, 2) if replicas else PipelineShape(2, 2)
    program = compile(
        one_f_one_b, shape, tied_weights=shape.ranks > 1, dp=1 + replicas, clip_grad_norm=True
    )
    transport = (EdgeGroups if is_different and differs == "transport" else GlooTransport)(program)
    stages = gpt_stages(shape.stages)
    if replicas and is_different:
        if differs == "gradients":
            use_float32_gradients(stages[0].bfloat16())
        elif differs == "hidden":
            stages = [gpt.build_stage(gpt.GPTConfig(32, 1, 32, 2, 8), 0, 1)]
        else:
            _change_parameters(stages[0], differs)
    if is_different and differs == "tied":
        (weight,) = (p for n, p in stages[1].named_parameters() if n == "head.weight")
        weight.data = weight.data[:-1]
    boundary = (*BOUNDARY.shape[:2], 32) if is_different and differs == "shape" else BOUNDARY.shape
    gradients = GradientOptions(
        max_norm=2.0 if is_different and differs == "max_norm" else 1.0,
        loss_scale=LossScale(8.0) if is_different and differs == "scale" else None,
    )
    Executor(
        program, transport.rank, {s: stages[s] for s in shape.stages_on_rank[transport.rank]},
        transport, loss=gpt.loss, boundary=Boundary(boundary), gradients=gradients,
        seed=int(is_different and differs == "seed"),
    )  # fmt: skip


def _change_parameters(stage: nn.Module, change: str) -> None:
    """Change a shape, the order of parameters, or the number of trained parameters."""
    weight, bias = (stage.get_parameter(f"layers.0.proj.{name}") for name in ("weight", "bias"))
    if change == "turned":
        weight.data = weight.data.view(8, 32)
    elif change == "order":
        proj = stage.get_submodule("layers.0.proj")
        proj._parameters.clear()
        proj.register_parameter("bias", bias)
        proj.register_parameter("weight", weight)
    else:
        stage.get_parameter("norm.bias").requires_grad_(False)


@pytest.mark.parametrize(
    ("differs", "message"),
    [
        ("shape", "the boundary: [2, 8, 16] of torch.float32 and [2, 8, 32] of torch.float32"),
        ("max_norm", "max_norm: 1.0 and 2.0"),
        ("scale", "the loss scale: None and 8 (growth 2, backoff 0.5, interval 2000)"),
        ("seed", "the seed: 0 and 1"),
        ("transport", "the transport: GlooTransport and EdgeGroups"),
        ("hidden", "parameter 0 of stage 0, slice 0: positions [8, 16] of torch.float32, "),
        ("gradients", "of torch.bfloat16, gradients in torch.float32"),
        (
            "turned",
            "layers.0.proj.weight [16, 16] of torch.float32, gradients in torch.float32 and ",
        ),
        ("order", "and layers.0.proj.bias [16] of "),
        ("fewer", "the parameters of stage 0, slice 0: "),
        ("tied", "the tied weight, slice 0: [32, 16] of "),
    ],
)
def test_difference_is_reported_in_every_process(differs: str, message: str) -> None:
    with pytest.raises(RankError) as caught:
        run(_build_executor, 2, differs, limit=60)
    assert len(caught.value.tracebacks) == 2
    for tb in caught.value.tracebacks.values():
        assert "ModelError: " in tb and "processes 0 and 1 do not agree on " in tb
        assert message in tb


def test_equal_settings_are_accepted() -> None:
    assert run(_build_executor, 2, "nothing") == [None, None]


def _build_trainer(process: int, config: Config) -> None:
    if process:
        config = replace(config, train=replace(config.train, lr=0.5))
    _Trainer(config, build_program(config), Corpus(config), None)


def test_different_learning_rates_are_refused() -> None:
    pipeline = PipelineConfig(schedule="one_f_one_b", ranks=2, microbatches=2)
    config: Any = Config(model=gpt.GPTConfig(256, 2, 16, 2, 8), pipeline=pipeline)
    with pytest.raises(RankError) as caught:
        run(partial(_build_trainer, config=config), 2, limit=60)
    for tb in caught.value.tracebacks.values():
        assert "processes 0 and 1 do not agree on train.lr: 0.001 and 0.5" in tb


@pytest.mark.parametrize("length", [0, 10, 200, 5000])
def test_long_difference_is_shortened_to_its_begin(length: int) -> None:
    values = ["x" * length + end for end in ("one" + "y" * length, "other" + "y" * length)]
    text = find_difference([{"the boundaries": value} for value in values])
    assert text.startswith("processes 0 and 1 do not agree on the boundaries: ")
    assert "xone"[length == 0 :] in text and "xother"[length == 0 :] in text and len(text) < 400
    assert all(value in text for value in values) == (2 * length + 5 <= 120)


def test_exchange_without_process_group_is_refused() -> None:
    with pytest.raises(ModelError, match=r"torch.distributed has no process group") as caught:
        select_exchange_device()
    assert "destroy_process_group() at the end" in caught.value.hint


def test_different_programs_get_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = [({"the program": name}, None) for name in ("first", "second")]
    monkeypatch.setattr(process_transport, "gather", lambda *_: facts)
    transport = object.__new__(process_transport.ProcessTransport)
    transport.parent_group, transport.name = None, "program"
    with pytest.raises(ModelError, match="agree on the program: first and second") as caught:
        transport.check_agreement({})
    assert caught.value.hint.startswith("every process must pass the same options")
