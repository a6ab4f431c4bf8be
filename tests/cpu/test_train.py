"""Tests of training through the command line."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from schedir.io.timeline_file import load_timeline
from schedir.training.learning_rate import compute_learning_rate
from schedir.training.train import run
from tests.check_calls import record_checks
from tests.cpu.train_command import (
    ONE_PROCESS,
    TORCHRUN,
    Run,
    find_free_port,
    make_arguments,
    make_torchrun_command,
    read_losses,
    run_launched,
    train,
    train_in_this_process,
)


def test_four_processes_equal_one_process(config: str, tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    many_losses = train(config, tmp_path / "many", "output.record=true", f'output.trace="{traces}"')
    one_losses = train_in_this_process(config, tmp_path / "one")
    assert len(many_losses) == 6 and many_losses[-1] < many_losses[0]
    assert many_losses == pytest.approx(one_losses, rel=1e-5)

    summary = json.loads((tmp_path / "many" / "summary.json").read_text())
    assert summary["loss"] == many_losses[-1]
    memory = summary["memory"]["predicted"]
    assert len(memory) == 2 and all(size > 4 * 4 * 12 * 32**2 / 2 for size in memory)
    assert 0 < summary["bubble"]["predicted"] < 1 and 0 < summary["bubble"]["measured"] < 1
    assert (tmp_path / "many" / "timeline.png").read_bytes().startswith(b"\x89PNG")
    trace = load_timeline(traces / "measured.timeline")
    assert (trace.kind, trace.unit, trace.progress_model) == ("measured", "s", "per_edge")
    assert trace.blocking_hosts
    assert trace.program.digest == summary["digest"]
    assert trace.span == summary["seconds"]["measured"]
    assert trace.peak_memory.tolist() == memory
    assert trace.clock_error == summary["clock_error"] == 0  # one machine, one clock
    assert not trace.causality_warning

    summary = json.loads((tmp_path / "one" / "summary.json").read_text())
    assert summary["loss"] == one_losses[-1] and "bubble" not in summary
    assert not (tmp_path / "one" / "timeline.png").exists()


def test_program_is_checked_once(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run checks it, and its executor and each prediction use the proof."""
    checks = record_checks(monkeypatch)
    train_in_this_process(config, tmp_path, "output.record=true")
    assert checks == [("complete", "interleaved"), ("proof", "interleaved")]


def test_two_nodes_equal_one_process(config: str, tmp_path: Path) -> None:
    sets = ["pipeline.tp=1", "train.steps=3"]
    torchrun = [*TORCHRUN, "--nnodes=2", "--master-addr=127.0.0.1", "--nproc-per-node=1",
                f"--master-port={find_free_port()}"]  # fmt: skip
    command = ["-m", "schedir", *make_arguments(config, tmp_path / "two", *sets)]
    agents = [Run([*torchrun, f"--node-rank={node}", *command], tmp_path / node) for node in "01"]
    for agent in agents:
        code, _, err = agent.finish()
        assert code == 0, err
    assert read_losses(tmp_path / "two") == pytest.approx(
        train_in_this_process(config, tmp_path / "one", *sets), rel=1e-5
    )


def test_replicas_with_uneven_stages_dropout_and_token_file(config: str, tmp_path: Path) -> None:
    """Two replicas of two stages are compared with one process and one stage."""
    tokens = tmp_path / "tokens.bin"
    np.random.default_rng(0).integers(300, size=500).astype("<u2").tofile(tokens)
    sets = [f'data.source="{tokens}"', "model.vocab=300", "model.tied=false", "train.steps=3",
            "train.clip_grad_norm=0", "pipeline.tp=1", "pipeline.schedule=gpipe",
            "pipeline.stages_per_rank=1"]  # fmt: skip
    # Each replica has half of the microbatches, so both together have the same batch.
    one_replica = [*sets, "pipeline.microbatches=4"]
    two_replicas = ["pipeline.microbatches=2", "pipeline.dp=2", "pipeline.layers_per_stage=[3, 1]"]
    dropout = "model.dropout=0.2"
    many_losses = train(config, tmp_path / "many", *sets, *two_replicas, dropout)
    one_losses = train_in_this_process(config, tmp_path / "one", *one_replica, dropout)
    assert many_losses == pytest.approx(one_losses, rel=1e-5)
    no_dropout = train_in_this_process(config, tmp_path / "none", *one_replica)
    assert no_dropout[0] != pytest.approx(one_losses[0], rel=1e-5)


def test_pipedream_2bw_losses_are_independent_of_ranks(config: str, tmp_path: Path) -> None:
    """Any number of ranks uses the same weight versions. Without versions, losses differ."""
    settings = ["pipeline.tp=1", "pipeline.stages_per_rank=1", "pipeline.schedule=pipedream_2bw",
                "pipeline.microbatches=6", "model.layers=2"]  # fmt: skip
    three_updates = [*settings, "pipeline.optimizer_steps=3"]
    one = train_in_this_process(config, tmp_path / "one", *three_updates)
    assert train(config, tmp_path / "many", *three_updates) == pytest.approx(one, rel=1e-5)
    assert train_in_this_process(config, tmp_path / "flushed", *settings)[-1] != pytest.approx(
        one[-1], rel=1e-2
    )


def test_gradients_of_wrong_update_are_refused(config: str, tmp_path: Path) -> None:
    sets = ["pipeline.tp=1", "pipeline.stages_per_rank=1", "pipeline.schedule=zb_h1",
            "pipeline.microbatches=8", "pipeline.optimizer_steps=4",
            "pipeline.weight_delay=1"]  # fmt: skip
    code, _, err = run_launched(make_arguments(config, tmp_path / "out", *sets), tmp_path / "out")
    assert code == 2 and "Traceback" not in err
    assert err.count("would add its gradients to update 0") == 1
    assert not (tmp_path / "out").exists()


def test_tokens_per_second_excludes_first_step(
    config: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train_in_this_process(config, tmp_path, "train.log_every=1", "train.steps=4")
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("step ")]
    speeds = [float(line.split(" tokens/s")[0].split()[-1].replace(",", "")) for line in lines]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert len(speeds) == 4
    assert summary["tokens_per_second"] == pytest.approx(
        3 / sum(1 / r for r in speeds[1:]), rel=0.01
    )


def test_wrong_number_of_processes_is_one_error(config: str, tmp_path: Path) -> None:
    command = make_torchrun_command(2, *make_arguments(config, tmp_path / "out"))
    code, _, err = run_launched(command, tmp_path / "out")
    assert code != 0
    assert err.count("there are 2 processes, but pp 2 x tp 2 x dp 1 needs 4") == 1


def test_training_equals_plain_loop(config: str, tmp_path: Path) -> None:
    """The loop uses torch's clipping and AdamW, so all optimizer options are compared."""
    import torch

    from schedir.models import gpt
    from schedir.training.batches.text_batches import Corpus
    from schedir.training.config.config_file import read_config

    sets = [*ONE_PROCESS, "train.betas=[0.5, 0.7]", "train.clip_grad_norm=0.3",
            "train.weight_decay=0.4", "train.lr=0.01",
            f'output.dir="{tmp_path}/out"']  # fmt: skip
    assert run(config, sets) == 0
    parsed = read_config(config, sets)
    assert isinstance(parsed.model, gpt.GPTConfig)
    model = gpt.build_stage(parsed.model, 0, 1)
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.4},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.5, 0.7))
    samples = Corpus(parsed).batches
    rates = [0.005, 0.01, 0.01, *(compute_learning_rate(parsed.train, k) for k in (3, 4, 5))]
    expected = []
    for step, rate in enumerate(rates):
        for group in optimizer.param_groups:
            group["lr"] = rate
        inputs, targets = samples.read_batch(step * samples.batch_size, samples.batch_size)
        optimizer.zero_grad()
        loss = gpt.loss(model(inputs), targets) / targets.numel()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 0.3)
        assert norm > 0.3  # otherwise clipping would have no effect
        optimizer.step()
        expected.append((float(loss.detach()), rate, float(norm), 0.0))
    with (tmp_path / "out" / "loss.csv").open() as file:
        rows = [list(map(float, row.values())) for row in csv.DictReader(file)]
    for (_, *row), wants in zip(rows, expected, strict=True):
        assert row == pytest.approx(wants, rel=1e-4)
