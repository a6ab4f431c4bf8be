"""Tests of the settings of Megatron that `schedir.megatron` refuses, and of its parts alone."""

from __future__ import annotations

import dataclasses
import shlex
import sys
import warnings
from ast import literal_eval
from contextlib import suppress
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from schedir import compile, from_text, to_text
from schedir.errors import UsageError
from schedir.planner import ParallelPlan, TransformerSpec, launcher_options
from tests.cpu.megatron_on_cpu import import_megatron, skip_without_megatron

skip_without_megatron()


@pytest.fixture(scope="module", autouse=True)
def _megatron() -> None:
    import_megatron()


def test_module_imported_during_build_keeps_original_functions() -> None:
    from megatron.core import utils

    from schedir.megatron.vee_model import as_pipeline_rank

    original, module = utils.get_pg_rank, ModuleType("megatron.imported_by_this_test")
    try:
        with as_pipeline_rank(3, group="pipeline"):
            assert utils.get_pg_rank("pipeline") == 3
            module.get_pg_rank = utils.get_pg_rank  # type: ignore[attr-defined]
            sys.modules[module.__name__] = module
        assert module.get_pg_rank is utils.get_pg_rank is original
        with as_pipeline_rank(3, group="pipeline"):
            assert module.get_pg_rank("pipeline") == 3
    finally:
        del sys.modules[module.__name__]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("context_parallel_size", 2),
        ("hybrid_context_parallel", True),
        ("expert_model_parallel_size", 2),
        ("overlap_moe_expert_parallel_comm", True),
        ("mtp_num_layers", 1),
        ("enable_autocast", True),
        ("num_microbatches_with_partial_activation_checkpoints", 1),
        ("fine_grained_activation_offloading", True),
        ("enable_cuda_graph", True),
        ("external_cuda_graph", True),
        ("cuda_graph_impl", "local"),
    ],
)
def test_unsupported_settings_are_refused_by_name(name: str, value: object) -> None:
    from schedir.megatron.run_requirements import require_supported_settings

    with pytest.raises(UsageError, match=f"{name}={value!r} is not supported") as caught:
        require_supported_settings([], SimpleNamespace(**{name: value}))
    assert caught.value.fields == (name,)


@pytest.mark.parametrize(
    ("ddp", "message"),
    [
        ({"use_megatron_fsdp": True}, "use_megatron_fsdp=True is not supported"),
        (
            {"overlap_grad_reduce": True, "num_distributed_optimizer_instances": 2},
            "num_distributed_optimizer_instances=2",
        ),
    ],
    ids=["fsdp", "optimizer instances"],
)
def test_unsupported_settings_of_ddp_are_refused(ddp: dict[str, Any], message: str) -> None:
    from schedir.megatron.run_requirements import require_supported_settings

    chunk = SimpleNamespace(ddp_config=SimpleNamespace(**ddp))
    with pytest.raises(UsageError, match=message):
        require_supported_settings([chunk], SimpleNamespace())


def test_looped_ranks_of_vee() -> None:
    from schedir.megatron.vee_model import find_looped_rank

    shape = compile("zb_v", ranks=4, microbatches=8).shape
    assert [find_looped_rank(shape, rank, 0) for rank in range(4)] == [0, 1, 2, 3]
    assert [find_looped_rank(shape, rank, 1) for rank in range(4)] == [3, 2, 1, 0]


def test_reduction_of_deferred_output_layer_is_postponed() -> None:
    from schedir.megatron.forward_backward_func import _GradientReduction

    started: list[int] = []
    chunks = [SimpleNamespace(parameters=partial(int, number)) for number in range(2)]
    config = SimpleNamespace(grad_sync_func=started.append, defer_embedding_wgrad_compute=True)
    reduction = _GradientReduction(config, chunks, False, has_last_stage=True)
    reduction(0)
    reduction(1)
    assert started == [0]
    reduction.start_postponed()
    assert started == [0, 1]


def test_delayed_gradients_without_setting_of_ddp_are_refused() -> None:
    from schedir.megatron.delayed_weight_gradients import require_delay_settings
    from tests.cpu.megatron_delayed_linears import DelayedLinear

    config = SimpleNamespace(delay_wgrad_compute=True, gradient_accumulation_fusion=False)
    chunk: Any = DelayedLinear(2, 2, config=config, bias=False, skip_bias_add=False)
    with pytest.raises(UsageError, match="DistributedDataParallelConfig is False"):
        require_delay_settings([chunk])
    chunk.ddp_config = SimpleNamespace(delay_wgrad_compute=True)
    require_delay_settings([chunk])
    chunk.wgrad_store = SimpleNamespace(delay_wgrad_compute=lambda: True)
    chunk.weight0.skip_backward_post_hook = False  # as before Transformer Engine 2.8
    with pytest.raises(UsageError, match="DelayedLinear delays weight gradients, but does not"):
        require_delay_settings([chunk])


RUN_OPTIONS = ("ranks", "microbatches", "stages_per_rank", "progress_model", "shape")


@pytest.mark.parametrize(
    ("schedule", "options", "fact", "hint"),
    [
        ("zb_h9", {}, "zb_h9", ""),
        ("zb_h1", {"cost": 3}, "compile has no option 'cost'", "costs"),
        *(("zb_h1", {n: 4}, f"{n} cannot be given: it is that of Mega", "") for n in RUN_OPTIONS),
        (
            "zb_h1", {"num_microbatches": 4}, "Megatron gives it at each step",
            "leave out num_microbatches",
        ),
    ],
)  # fmt: skip
def test_unknown_schedules_and_options_are_refused(
    schedule: str, options: dict[str, Any], fact: str, hint: str
) -> None:
    """They are refused before the first step."""
    import schedir.megatron

    with pytest.raises(UsageError, match=fact) as caught:
        schedir.megatron.forward_backward(schedule, **options)
    assert hint in caught.value.hint


def test_receive_before_shape_is_known_is_refused() -> None:
    from schedir.megatron.schedule_compilation import require_shapes_before_receives

    program = compile("gpipe", ranks=2, microbatches=2, progress_model="per_edge")
    require_shapes_before_receives(program)
    text = to_text(program).replace("recv_grad 0.0+; B 0.0+", "B 0.0+")
    text = text.replace("rank 0\n", "rank 0\n  recv_grad 0.0\n  recv_grad 0.1\n")
    with pytest.raises(UsageError, match="rank 0 waits at recv_grad"):
        require_shapes_before_receives(from_text(text))


@pytest.mark.parametrize("fields", [
    {"pp": 4, "layers_per_stage": (2, 4, 4, 2)},
    {"pp": 3, "stages_per_rank": 2, "schedule": "interleaved", "microbatches": 3,
     "layers_per_stage": (1, 3, 3, 3, 2, 0)},
    {"pp": 2, "stages_per_rank": 3, "schedule": "interleaved", "microbatches": 2},
    {"tp": 2, "cp": 2, "dp": 2, "sequence_parallel": True, "recompute": "selective"},
    {"dp": 2, "zero": 2, "recompute": "full", "attention": "flash"},
    {"dp": 2, "pp": 2, "stages_per_rank": 2, "schedule": "interleaved", "microbatches": 2,
     "zero": 1},
    {"optimizer_placement": "host"},
])  # fmt: skip
def test_options_of_a_plan_configure_megatron(fields: dict[str, Any]) -> None:
    """Megatron's configurations have the fields, and its layout has the layers of the plan."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    plan = ParallelPlan(**fields)
    model = TransformerSpec(layers=12, hidden=64, heads=4, vocab=256, sequence=32)
    settings: dict[str, dict[str, Any]] = {}
    for line in launcher_options(model, plan)["nemo"].splitlines():
        for pair in [] if line.startswith("#") else shlex.split(line):
            name, value = pair.split("=", 1)
            section, _, field = name.rpartition(".")
            text = {"true": "True"}.get(value, value).strip('"')
            with suppress(ValueError, SyntaxError):
                settings.setdefault(section, {})[field] = literal_eval(text)
            settings.setdefault(section, {}).setdefault(field, text)
    config_classes = {"ddp": DistributedDataParallelConfig, "optimizer": OptimizerConfig}
    for section, config_class in config_classes.items():
        assert {*settings.get(section, {})} <= {
            field.name for field in dataclasses.fields(config_class)
        }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron warns of its own defaults.
        config = TransformerConfig(
            num_layers=12, hidden_size=64, num_attention_heads=4,
            pipeline_dtype=torch.bfloat16, **settings["model"],
        )  # fmt: skip
    assert config.virtual_pipeline_model_parallel_size in (plan.stages_per_rank, None)
    if plan.layers_per_stage:
        stages = config.pipeline_model_parallel_layout.layout
        layers = (
            sum(kind.name == "decoder" for kind in stages[rank][chunk])
            for chunk in range(plan.stages_per_rank) for rank in range(plan.pp)
        )  # fmt: skip
        assert tuple(layers) == plan.layers_per_stage
