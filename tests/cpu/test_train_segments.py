"""Tests that `schedir train` in segments and chunks has the bits of whole stages."""

from __future__ import annotations

from pathlib import Path

import pytest

from schedir import Costs, PipelineShape, compile, schedules, to_text
from tests.cpu.train_command import CONFIG, read_losses, train, train_in_this_process

CONSTANT_RATE = ["train.lr=0.001", "train.min_lr=0.001"]  # independent of the number of steps
DROPOUT = ["model.dropout=0.1", *CONSTANT_RATE]
# For one process: in a tied model the embedding would be in another segment than the head.
UNTIED = ["model.tied=false", "model.dropout=0.1", *CONSTANT_RATE]
SMALL_MICROBATCHES = ["pipeline.microbatches=6", "data.microbatch_size=1"]
EVALUATION = ["train.evaluate_every=2", "data.validation=0.2", "train.evaluate_batches=2"]


@pytest.fixture
def config(tmp_path: Path) -> str:
    text, path = tmp_path / "text.txt", tmp_path / "config.toml"
    text.write_text("to be or not to be " * 200)
    small = CONFIG.replace("interleaved", "one_f_one_b").replace("stages_per_rank = 2\n", "")
    small = small.replace("layers = 4", "layers = 2").replace("steps = 6", "steps = 4")
    path.write_text(small.format(text=text))
    return str(path)


def read_evaluations(folder: Path) -> str:
    return (folder / "evaluation.csv").read_text()


def test_segments_train_like_whole_stages(config: str, tmp_path: Path) -> None:
    """Four processes run a named schedule, and a program file.

    The file fills the waits for sums. Checkpoints of one continue in the other. The model is tied,
    with dropout, clipping and sequence parallelism.
    """
    settings = [*DROPOUT, *EVALUATION, "pipeline.sequence_parallel=true"]
    saved = [f'train.checkpoint_dir="{tmp_path / "saved"}"', "train.checkpoint_every=2"]
    stage_losses = train(config, tmp_path / "whole", *settings)
    half = ["pipeline.stage_segments=layers", "train.steps=2", "output.record=true"]
    train(config, tmp_path / "half", *settings, *saved, *half)
    assert read_losses(tmp_path / "half") == stage_losses[:2]
    assert read_evaluations(tmp_path / "whole").startswith(read_evaluations(tmp_path / "half"))
    program = compile(
        schedules.one_f_one_b, PipelineShape(2, 3), tp=2, stage_segments=5, tied_weights=True,
        clip_grad_norm=True, checkpoint_snapshots=True, sequence_parallel=True,
        fill_collective_waits="F", blocking_hosts=True, progress_model="per_edge",
        costs=Costs(F=1, B=2, tp_reduce=0.5),
    )  # fmt: skip
    (file := tmp_path / "filled.sched").write_text(to_text(program))
    filled = f'pipeline.schedule="{file}"'
    train(config, tmp_path / "on", filled, *settings, *saved)
    assert read_losses(tmp_path / "on") == stage_losses[2:]


def test_checkpoint_of_whole_stages_resumes_in_segments(config: str, tmp_path: Path) -> None:
    """A run with chunks is also compared with a run with smaller microbatches."""
    saved = [f'train.checkpoint_dir="{tmp_path / "saved"}"', "train.checkpoint_every=2"]
    settings = [*UNTIED, *EVALUATION]
    stage_losses = train_in_this_process(config, tmp_path / "whole", *settings)
    train_in_this_process(config, tmp_path / "half", *settings, *saved, "train.steps=2")
    train_in_this_process(config, tmp_path / "on", *settings, *saved, "pipeline.stage_segments=9")
    assert read_losses(tmp_path / "on") == stage_losses[2:]
    last_evaluations = (
        read_evaluations(tmp_path / name).splitlines()[-1] for name in ("on", "whole")
    )
    assert len({*last_evaluations}) == 1
    chunks = ["train.steps=2", "pipeline.stage_segments=layers", "pipeline.microbatch_chunks=2"]
    chunk_losses = train_in_this_process(config, tmp_path / "chunks", *settings, *chunks)
    small = [*settings, "train.steps=2", *SMALL_MICROBATCHES]
    assert chunk_losses == train_in_this_process(config, tmp_path / "small", *small)
    assert chunk_losses != stage_losses[:2]
    assert read_evaluations(tmp_path / "chunks") == read_evaluations(tmp_path / "small")


def test_microbatch_chunks_train_like_microbatches(config: str, tmp_path: Path) -> None:
    settings = ["model.kind=llama", "train.steps=2"]
    chunk_losses = train_in_this_process(
        config, tmp_path / "chunks", *settings, "pipeline.microbatch_chunks=2"
    )
    small_losses = train_in_this_process(config, tmp_path / "small", *settings, *SMALL_MICROBATCHES)
    assert chunk_losses == small_losses
