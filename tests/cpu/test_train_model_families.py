"""Tests that `schedir train` trains and resumes each kind of model as one process does."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from schedir.__main__ import main
from schedir.errors import ConfigError
from schedir.training.config.config_file import read_config
from schedir.training.config.model_kinds import MODEL_KINDS, get_model_kind
from schedir.training.model_factory import MODELS
from schedir.training.train import run as train_run
from tests.cpu.train_command import CONFIG, read_losses, train, train_in_this_process

LLAMA_SETTINGS = ["model.kind=llama", "model.layers=4", "model.heads=4", "model.kv_heads=2",
                  "model.window=[0, 6, 6, 5]"]  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> str:
    text, path = tmp_path / "text.txt", tmp_path / "config.toml"
    text.write_text("the quick brown fox jumps over the lazy dog, and over the other one " * 60)
    path.write_text(CONFIG.replace("layers = 4\n", "").format(text=text))
    return str(path)


def read_evaluations(folder: Path) -> list[tuple[str, ...]]:
    with (folder / "evaluation.csv").open() as file:
        return [tuple(row) for row in csv.reader(file)]


def test_llama_on_processes_trains_and_resumes_like_one(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = [*LLAMA_SETTINGS, "train.steps=4", "train.evaluate_every=2", "data.validation=0.1",
            "train.evaluate_batches=2", "pipeline.tp=1",
            "train.lr=0.001", "train.min_lr=0.001", "train.warmup=0"]  # fmt: skip
    two_losses = train(config, tmp_path / "two", *sets)
    assert two_losses == train_in_this_process(config, tmp_path / "one", *sets)
    assert len(two_losses) == 4
    assert two_losses[-1] < two_losses[0]
    assert read_evaluations(tmp_path / "two") == read_evaluations(tmp_path / "one")
    folder = f'train.checkpoint_dir="{tmp_path / "saved"}"'
    checkpointed = [*sets, folder, "train.checkpoint_every=2"]
    train_in_this_process(config, tmp_path / "three", *checkpointed, "train.steps=2")
    train_in_this_process(config, tmp_path / "on", *checkpointed)
    assert read_losses(tmp_path / "on")[-2:] == two_losses[-2:]
    export = ["checkpoint", "export", str(tmp_path / "saved"), "--as", "transformers"]
    capsys.readouterr()
    assert main([*export, "--to", str(tmp_path / "out")]) == 2
    assert "is not a GPT of schedir train: it is of kind llama\n" in capsys.readouterr().err


MOE_SETTINGS = ["model.kind=moe", "model.layers=2", "model.experts=4", "model.tied=false",
                "pipeline.tp=1", "model.shared_experts=1", "model.balance_rate=0.01",
                "train.evaluate_every=4", "data.validation=0.1", "train.evaluate_batches=2",
                "train.lr=0.001", "train.min_lr=0.001", "train.warmup=0"]  # fmt: skip


def test_expert_parallel_replicas_train_like_one_process(config: str, tmp_path: Path) -> None:
    ep = ["pipeline.ranks=1", "pipeline.dp=2", "pipeline.ep=2", "pipeline.stage_segments=layers",
          "pipeline.schedule=zb_h1", "pipeline.stages_per_rank=1", "pipeline.zero=1",
          f'train.checkpoint_dir="{tmp_path / "saved"}"', "train.checkpoint_every=4"]  # fmt: skip
    one_settings = [*MOE_SETTINGS, "pipeline.microbatches=6", "train.steps=6"]
    parallel_losses = train(config, tmp_path / "two", *MOE_SETTINGS, *ep, "train.steps=4")
    one_losses = train_in_this_process(config, tmp_path / "one", *one_settings)
    assert parallel_losses == pytest.approx(one_losses[:4], rel=1e-5)
    assert parallel_losses[-1] < parallel_losses[0]
    (_, (_, loss, *_)), (_, (_, expected_loss, *_), *_) = (
        read_evaluations(tmp_path / run) for run in ("two", "one")
    )
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-5)
    resumed = train_in_this_process(config, tmp_path / "on", *one_settings, *ep[-2:])
    assert resumed[-2:] == pytest.approx(one_losses[-2:], rel=1e-5)


def test_model_kind_tables_have_same_kinds() -> None:
    assert MODEL_KINDS.keys() == MODELS.keys()
    assert {get_model_kind(kind.config_class()) for kind in MODEL_KINDS.values()} == {*MODEL_KINDS}


EXPERT_PARALLEL = ["model.kind=moe", "pipeline.tp=1", "pipeline.dp=2", "pipeline.ep=2",
                   "pipeline.stage_segments=layers"]  # fmt: skip


@pytest.mark.parametrize(
    ("sets", "field"),
    [
        (["model.kind=rnn"], "rnn"),
        (["model.kind=[1]"], "1"),
        (["model.kind=llama", "model.dropout=0.1"], "dropout"),
        (["model.kv_heads=2"], "it is a setting of kind = llama"),
        (["model.kind=llama", "model.heads=4", "model.kv_heads=1"], "keys and values"),
        (["pipeline.dp=2", "pipeline.ep=2"], "the model has no experts"),
        (["model.kind=moe"], "has no tensor parallelism"),
        ([*EXPERT_PARALLEL, "pipeline.stage_segments=1"], "need segments"),
        ([*EXPERT_PARALLEL, "model.experts=3"], "does not divide 3 experts"),
        ([*EXPERT_PARALLEL, "pipeline.zero=2"], "zero is 2, but with ep = 2"),
        ([*EXPERT_PARALLEL, "pipeline.frozen_stages=1"], "cannot have frozen stages"),
        ([*EXPERT_PARALLEL, "model.active=9"], "active is 9, but a layer has only 8 experts"),
        ([*EXPERT_PARALLEL, "model.capacity_factor=0.5"], "capacity_factor is 0.5"),
        ([*EXPERT_PARALLEL, "model.aux_loss=-1"], "aux_loss is -1"),
        (["model.context=17", "pipeline.sequence_parallel=true"], "context of 17 tokens"),
    ],
)
def test_setting_unsupported_by_model_kind_is_refused(
    config: str, sets: list[str], field: str
) -> None:
    with pytest.raises(ConfigError) as error:
        read_config(config, sets)
    assert field in f"{error.value.fact} {error.value.hint} {error.value.location}"


def test_impossible_pipeline_setting_is_refused_with_location(config: str) -> None:
    with pytest.raises(ConfigError) as error:
        train_run(config, [*EXPERT_PARALLEL, "pipeline.ep=2", "pipeline.dp=3"])
    assert error.value.location == "--set pipeline.ep=2" and {*error.value.fields} == {"ep", "dp"}


@pytest.mark.parametrize("kind", ["bert", "encoder_decoder"])
def test_example_model_kinds_are_refused_with_hint(config: str, kind: str) -> None:
    with pytest.raises(ConfigError, match=f"kind '{kind}' is not known") as error:
        read_config(config, [f"model.kind={kind}"])
    assert error.value.hint == f"examples/{kind}.py trains it with schedir.runtime.Executor"
    assert error.value.location == f"--set model.kind={kind}"
