"""Tests of plans as programs, as configurations of our trainer, and as options of others."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schedir import planner, to_text
from schedir.__main__ import main
from schedir.errors import UsageError
from schedir.planner.launch_options import launcher_options
from schedir.planner.plan_compilation import plan_program
from schedir.planner.train_config_export import train_config
from schedir.predict.layer_activation_bytes import Recompute
from schedir.training.config import config_file

RECOMPUTE: Final[tuple[Recompute, ...]] = get_args(Recompute)
MODEL = planner.TransformerSpec(layers=12, hidden=768, heads=12, vocab=8192, sequence=512)


# ---------------------------------------------------------------- options of other trainers


def match_group(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match, text
    return match[1]


def parse_megatron_layout(text: str) -> tuple[int, ...]:
    """Return the layers of each stage of Megatron-LM's layout, read as in its user guide."""
    text = match_group(r'layout "([^"]*)"', text)
    text = re.sub(r"\(([^)]+)\)\*(\d+)", lambda x: x[1] * int(x[2]), text)
    text = re.sub(r"(.)\*(\d+)", lambda x: x[1] * int(x[2]), text)
    assert text[0] == "E" and text[-1] == "L" and {*text} <= {*"EtL|"}
    return tuple(stage.count("t") for stage in text.split("|"))


def count_torchtitan_layers(text: str, stages: int, layers: int) -> tuple[int, ...]:
    """Return torchtitan's layers of each stage, with fewer layers in the first and the last."""
    fewer_first, fewer_last = (int(n) for n in re.findall(r"less_layers = (\d+)", text))
    layers_each, remainder = divmod(layers + fewer_first + fewer_last, stages)
    layers_by_stage = [layers_each + (stage < remainder) for stage in range(stages)]
    layers_by_stage[0] -= fewer_first
    layers_by_stage[-1] -= fewer_last
    return tuple(layers_by_stage)


@settings(deadline=None)
@given(st.data())
def test_launcher_options_give_layer_division(data: st.DataObject) -> None:
    p, v = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 3))
    layers_by_stage = data.draw(st.lists(st.integers(1, 4), min_size=p * v, max_size=p * v))
    end_layers = data.draw(st.tuples(st.integers(1, 3), st.integers(0, 3)))
    layers_by_stage[0], layers_by_stage[-1] = end_layers
    model = replace(MODEL, layers=sum(layers_by_stage))
    schedule = "interleaved" if v > 1 else "one_f_one_b"
    choice = planner.ParallelPlan(
        pp=p,
        stages_per_rank=v,
        microbatches=p,
        schedule=schedule,
        layers_per_stage=tuple(layers_by_stage),
    )
    options = launcher_options(model, choice)
    if len({*layers_by_stage}) > 1:
        assert parse_megatron_layout(options["megatron"]) == choice.layers_per_stage
        assert "num-virtual-stages" not in options["megatron"]  # Megatron-LM refuses both.
    else:
        assert "layout" not in options["megatron"]
        found = re.search(r"--num-virtual-stages-per-pipeline-rank (\d+)", options["megatron"])
        assert int(found[1] if found else 1) == v
    titan = options["torchtitan"]
    if "less_layers" in titan:
        assert count_torchtitan_layers(titan, p * v, model.layers) == choice.layers_per_stage
    else:
        module_lists = tomllib.loads(titan)["parallelism"]["module_fqns_per_model_part"]
        assert module_lists[0][0] == "tok_embeddings" and module_lists[-1][-2:] == [
            "norm",
            "output",
        ]
        assert (
            tuple(sum("layers." in n for n in stage_modules) for stage_modules in module_lists)
            == choice.layers_per_stage
        )


def test_launcher_options_for_unsupported_schedule() -> None:
    model, choice = (
        MODEL,
        planner.ParallelPlan(pp=2, stages_per_rank=2, microbatches=4, schedule="zb_v"),
    )
    options = launcher_options(model, choice)
    assert "# Megatron-LM has no schedule zb_v" in options["megatron"]
    assert "--num-virtual-stages-per-pipeline-rank 2" in options["megatron"]
    assert "# nanotron has no schedule zb_v" in options["nanotron"]
    assert 'pipeline_parallel_schedule = "ZBVZeroBubble"' in options["torchtitan"]


def list_comments(options: str) -> str:
    return "\n".join(line for line in options.splitlines() if line.lstrip().startswith("#"))


def list_arguments(options: str) -> dict[str, str]:
    """Return the arguments of Megatron-LM in lines that are not comments."""
    lines = [line for line in options.splitlines() if not line.startswith("#")]
    return dict(re.findall(r"--([\w-]+)(?: ([^-\s]\S*))?", "\n".join(lines)))


@settings(deadline=None)
@given(
    pp=st.integers(1, 4), tp=st.integers(1, 4), dp=st.integers(1, 4), cp=st.integers(1, 2),
    microbatches=st.integers(1, 4), microbatch_size=st.integers(1, 4), zero=st.integers(0, 3),
    sequence_parallel=st.booleans(), recompute=st.sampled_from(["none", "selective", "full"]),
)  # fmt: skip
def test_launcher_options_describe_the_plan(**fields: Any) -> None:
    plan = planner.ParallelPlan(**fields)
    options = launcher_options(replace(MODEL, layers=plan.pp), plan)
    megatron = list_arguments(options["megatron"])
    nemo = dict(re.findall(r"(\w+)=(\w+)", options["nemo"]))
    torchtitan = tomllib.loads(options["torchtitan"])
    parallelism, training = torchtitan["parallelism"], torchtitan["training"]
    nanotron = dict(re.findall(r"(\w+): (\w+)", options["nanotron"]))
    degrees = {"tensor": plan.tp, "pipeline": plan.pp, "context": plan.cp}
    for name, degree in degrees.items():
        option = f"{name}-model-parallel-size" if name != "context" else "context-parallel-size"
        assert megatron.get(option, "1") == nemo.get(option.replace("-", "_"), "1") == str(degree)
        assert parallelism.get(f"{name}_parallel_degree", 1) == degree
    assert [nanotron["dp"], nanotron["pp"], nanotron["tp"]] == [
        *map(str, (plan.dp, plan.pp, plan.tp))
    ]
    replicas = parallelism["data_parallel_replicate_degree"]
    shards = parallelism["data_parallel_shard_degree"]
    assert replicas * shards == plan.dp
    # torchtitan 0.2.2 refuses replicas without shards together with any other degree.
    assert replicas == 1 or (shards == 1 and plan.gpus == replicas and plan.zero == 0)
    batch = int(nanotron["micro_batch_size"]) * int(nanotron["batch_accumulation_per_replica"])
    assert batch * plan.dp == plan.batch == int(megatron["global-batch-size"])
    assert megatron["micro-batch-size"] == nemo["micro_batch_size"] == str(plan.microbatch_size)
    assert nemo["global_batch_size"] == str(plan.batch) and training["global_batch_size"] == (
        plan.batch
    )
    assert ("sequence-parallel" in megatron) == (plan.sequence_parallel and plan.tp > 1)
    assert ("use-distributed-optimizer" in megatron) == (plan.zero > 0)
    mode = torchtitan["activation_checkpoint"]["mode"]
    assert megatron.get("recompute-granularity", "none") == mode == plan.recompute
    assert nanotron["zero_stage"] == str(min(plan.zero, 1))
    assert ("# nanotron has no ZeRO" in options["nanotron"]) == (plan.zero > 1)
    assert ("use-megatron-fsdp" in megatron) == (plan.zero > 1) == ("use_megatron_fsdp" in nemo)


# What each trainer requires is in its source: `validate_args` of Megatron-LM, `parallelize_llama`
# and `ParallelDims` of torchtitan, and `Config` of nanotron.
@pytest.mark.parametrize(("fields", "megatron", "comment"), [
    ({"optimizer_placement": "host"}, {"use-precision-aware-optimizer": "",
     "use-distributed-optimizer": "", "optimizer-offload-fraction": "1.0"}, ""),
    ({"zero": 2, "dp": 2}, {"data-parallel-sharding-strategy": "optim_grads",
     "ckpt-format": "fsdp_dtensor"}, "CUDA_DEVICE_MAX_CONNECTIONS to be unset"),
    ({"zero": 3, "dp": 2}, {"data-parallel-sharding-strategy": "optim_grads_params",
     "ckpt-format": "fsdp_dtensor"}, "these options are ZeRO 3"),
    ({"tp": 2}, {"attention-backend": "unfused"}, "CUDA_DEVICE_MAX_CONNECTIONS=1"),
    ({"attention": "flash"}, {"attention-backend": "flash"}, ""),
    ({"cp": 3}, {"context-parallel-size": "3"}, "a multiple of 6 tokens"),
    ({"pp": 2, "dp": 2}, {"use-tp-pp-dp-mapping": ""}, ""),
    ({"pp": 2, "dp": 2, "stages_per_rank": 2, "schedule": "interleaved", "microbatches": 2,
      "zero": 1}, {"overlap-grad-reduce": "", "overlap-param-gather": ""}, ""),
    ({"offload": "fit"}, {}, "no option offloads activations"),
])  # fmt: skip
def test_megatron_options_pass_its_checks(
    fields: dict[str, Any], megatron: dict[str, str], comment: str
) -> None:
    options = launcher_options(MODEL, planner.ParallelPlan(**fields))["megatron"]
    assert {**list_arguments(options), **megatron} == list_arguments(options)
    assert comment in list_comments(options)
    assert list_arguments(options)["bf16"] == ""


def test_options_of_experts() -> None:
    model = replace(MODEL, experts=4, active=2, kv_heads=2)
    plan = planner.ParallelPlan(tp=4, dp=2, ep=2, pp=2, rank_order="tp-pp-dp")
    options = launcher_options(model, plan)
    assert list_arguments(options["megatron"])["expert-model-parallel-size"] == "2"
    assert "sequence-parallel" in list_arguments(options["megatron"])
    assert "requires it with experts and tp" in list_comments(options["megatron"])
    assert "use-tp-pp-dp-mapping" not in list_arguments(options["megatron"])
    assert "rank order tp-pp-dp" in list_comments(options["megatron"])
    parallelism = tomllib.loads(options["torchtitan"])["parallelism"]
    assert parallelism["expert_tensor_parallel_degree"] == 4
    assert parallelism["data_parallel_shard_degree"] == 2
    assert "expert_parallel_degree = 8" in list_comments(options["torchtitan"])
    assert "expert_parallel_size" not in options["nanotron"]
    assert "at most the 2 heads" in list_comments(options["nanotron"])


def test_precision_of_a_stack() -> None:
    plan = planner.ParallelPlan()
    options = launcher_options(MODEL, plan, stack="megatron-fp8")
    assert "--bf16 --fp8-format hybrid" in options["megatron"]
    assert "mixed_precision=bf16_with_fp8_delayed_scaling_mixed" in options["nemo"]
    for trainer in ("torchtitan", "nanotron"):
        last_line = options[trainer].splitlines()[-1]
        assert last_line == "# the plan is in FP8, and these options are in 16 bits"
    for stack in ("", "megatron", "megatron-2021", "nanotron"):
        assert "fp8" not in "".join(launcher_options(MODEL, plan, stack=stack).values()).lower()


# ---------------------------------------------------------------- for our trainer


def test_train_config_contains_plan() -> None:
    choice = planner.ParallelPlan(pp=2, tp=2, dp=2, stages_per_rank=2, microbatch_size=3,
                                  microbatches=8, schedule="interleaved", zero=2,
                            recompute="full", layers_per_stage=(3, 3, 4, 2))  # fmt: skip
    config = tomllib.loads(train_config(MODEL, choice, steps=7))
    assert config["pipeline"] == {
        "schedule": "interleaved", "ranks": 2, "microbatches": 8, "stages_per_rank": 2,
        "tp": 2, "dp": 2, "layers_per_stage": [3, 3, 4, 2], "zero": 2,
    }  # fmt: skip
    assert config["memory"] == {"recompute": "all"}
    assert config["data"] == {"microbatch_size": 3}
    assert config["train"] == {"steps": 7}


@st.composite
def plans(draw: st.DrawFn) -> planner.ParallelPlan:
    schedule, v = draw(st.sampled_from([
        ("one_f_one_b", 1), ("gpipe", 1), ("zb_h1", 1), ("zb_v", 2), ("interleaved", 2),
        ("interleaved", 3), ("looped_bfs", 4),
    ]))  # fmt: skip
    p, t, d = draw(st.sampled_from([1, 2, 3])), *(draw(st.sampled_from([1, 2])) for _ in range(2))
    layers_by_stage = draw(st.lists(st.integers(1, 3), min_size=p * v, max_size=p * v))
    return planner.ParallelPlan(
        pp=p, tp=t, dp=d, stages_per_rank=v, microbatch_size=draw(st.integers(1, 3)),
        microbatches=p * draw(st.integers(2, 3)),
        schedule=schedule, layers_per_stage=tuple(layers_by_stage),
        zero=draw(st.integers(0, 3)) if d > 1 else 0,
        recompute=draw(st.sampled_from([RECOMPUTE[0], RECOMPUTE[2]])),
    )  # fmt: skip


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(plans(), st.booleans(), st.sampled_from(["cpu", "cuda"]))
def test_train_config_compiles_program_of_plan(
    tmp_path: Path, choice: planner.ParallelPlan, tied: bool, device: str
) -> None:
    model = replace(MODEL, layers=sum(choice.layers_per_stage), tied=tied)
    file = tmp_path / "plan.toml"
    file.write_text(train_config(model, choice, device=device, clip_grad_norm=1.0))
    read = config_file.read_config(str(file))
    program = read.request.program
    assert (
        program.digest
        == plan_program(
            choice, tied_weights=tied, overlap=True, buffer_sharing=read.buffer_sharing
        ).digest
    )
    assert (read.pipeline.layers_per_stage or choice.layers_per_stage) == choice.layers_per_stage
    assert (read.world_size, read.data.microbatch_size) == (choice.gpus, choice.microbatch_size)
    assert (read.model.layers, read.model.hidden, read.model.heads, read.model.vocab,
            read.model.context) == (model.layers, 768, 12, 8192, 512)  # fmt: skip


def test_plan_is_exported(tmp_path: Path) -> None:
    """A plan is exported as a program file, which can be used again and exported to torch."""
    file, table = tmp_path / "plan.sched", tmp_path / "plan.csv"
    choice = planner.ParallelPlan(
        pp=4, dp=2, stages_per_rank=2, microbatches=8, schedule="interleaved", zero=1
    )
    file.write_text(to_text(plan_program(choice)))
    assert main(["export", str(file), "--to", "torch", "-o", str(table)]) == 0
    assert table.read_text().count("\n") == 4
    assert plan_program(replace(choice, schedule=str(file))).digest == plan_program(choice).digest
    with pytest.raises(UsageError) as caught:
        plan_program(replace(choice, schedule=str(file), dp=3))
    assert caught.value.fields == ("dp",)


@pytest.mark.parametrize(("model", "choice"), [
    ({"kv_heads": 4}, {}), ({"head_dim": 128}, {}), ({"gated": True}, {}), ({"ffn": 100}, {}),
    ({"rotary": True}, {}), ({"experts": 4, "active": 2}, {}), ({}, {"cp": 2}),
    ({}, {"ep": 2, "dp": 2}), ({}, {"recompute": "selective"}), ({}, {"tp": 5}),
    ({}, {"layers_per_stage": (4, 0, 4, 4), "pp": 4}),
    ({}, {"rank_order": "tp-dp-pp", "pp": 2, "dp": 2}),
])  # fmt: skip
def test_plan_that_trainer_cannot_run_is_refused(
    model: dict[str, Any], choice: dict[str, Any]
) -> None:
    with pytest.raises(UsageError) as caught:
        train_config(replace(MODEL, **model), planner.ParallelPlan(**choice))
    assert {*caught.value.fields} & {*model, *choice}


@pytest.mark.parametrize(("choice", "field"), [
    (planner.ParallelPlan(pp=2, microbatches=4, stages_per_rank=2), "stages_per_rank"),
    (planner.ParallelPlan(pp=2, microbatches=4, stages_per_rank=3, schedule="zb_v"),
     "stages_per_rank"),
    (planner.ParallelPlan(pp=2, microbatches=4, schedule="zb_v"), "stages_per_rank"),
])  # fmt: skip
def test_wrong_stages_per_rank_is_refused(choice: planner.ParallelPlan, field: str) -> None:
    with pytest.raises(UsageError) as caught:
        plan_program(choice)
    assert field in caught.value.fields
