"""Training through the command line: its losses, its processes, and how they end."""

from __future__ import annotations

import csv
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from schedir.errors import ConfigError, ProgramError, UsageError
from schedir.train import run

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 240  # seconds: enough on any machine, and the end of a hang
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ALONE = ["pipeline.ranks=1", "pipeline.stages_per_rank=1", "pipeline.tp=1", "pipeline.dp=1"]

CONFIG = """\
[model]
layers = 4
hidden = 32
heads = 2
context = 16

[pipeline]
schedule = "interleaved"
ranks = 2
stages_per_rank = 2
tp = 2
microbatches = 3

[data]
source = "{text}"
microbatch_size = 2

[train]
steps = 6
warmup = 2
log_every = 4
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog " * 40)
    path = tmp_path / "run.toml"
    path.write_text(CONFIG.format(text=text))
    return str(path)


def arguments(config: str, folder: Path, *sets: str) -> list[str]:
    return ["train", config, *(f"--set={s}" for s in (*sets, f'output.folder="{folder}"'))]


def start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code and what was said; a process that hangs is ended, and fails the test."""
    try:
        out, err = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    return process.returncode, out, err


def train(config: str, folder: Path, *sets: str) -> list[float]:
    """The losses of a run of as many processes as it asks for."""
    command = [sys.executable, "-m", "schedir", *arguments(config, folder, *sets)]
    code, out, err = finish(start(command))
    assert code == 0, err
    assert err == "" and out.startswith("step ")
    return losses(folder)


def alone(config: str, folder: Path, *sets: str) -> list[float]:
    """The losses of the same run in this process."""
    assert run(config, [*sets, *ALONE, f'output.folder="{folder}"']) == 0
    return losses(folder)


def losses(folder: Path) -> list[float]:
    with (folder / "loss.csv").open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


# Losses


def test_four_processes_are_one_and_torchrun_is_the_launcher(config: str, tmp_path: Path) -> None:
    many, one = train(config, tmp_path / "many"), alone(config, tmp_path / "one")
    assert len(many) == 6 and many[-1] < many[0]
    assert many == pytest.approx(one, rel=1e-5)

    summary = json.loads((tmp_path / "many" / "summary.json").read_text())
    assert summary["loss"] == many[-1]
    assert 0 < summary["bubble"]["predicted"] < 1 and 0 < summary["bubble"]["measured"] < 1
    assert (tmp_path / "many" / "timeline.png").read_bytes().startswith(b"\x89PNG")

    again = [*TORCHRUN, "--standalone", "--nproc-per-node", "4", "-m", "schedir"]
    code, _, err = finish(start([*again, *arguments(config, tmp_path / "again")]))
    assert code == 0, err
    bits = [(tmp_path / name / "loss.csv").read_bytes() for name in ("many", "again")]
    assert bits[0] == bits[1]


def test_two_nodes(config: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    where = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", port]
    what = ["-m", "schedir", *arguments(config, tmp_path / "two", "pipeline.tp=1")]
    agents = [
        start([*TORCHRUN, *where, "--nproc-per-node", "1", "--node-rank", node, *what])
        for node in ("0", "1")
    ]
    for code, _, err in map(finish, agents):
        assert code == 0, err
    assert losses(tmp_path / "two") == pytest.approx(alone(config, tmp_path / "one"), rel=1e-5)


def test_replicas_uneven_stages_and_a_token_file(config: str, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.bin"
    np.random.default_rng(0).integers(300, size=500).astype("<u2").tofile(tokens)
    sets = [f'data.source="{tokens}"', "model.vocab=300", "model.tied=false", "train.clip=0"]
    # A replica has half of the microbatches: together they have the same batch.
    whole = [*sets, "pipeline.microbatches=4"]
    half = [*sets, "pipeline.microbatches=2", "pipeline.dp=2", "pipeline.tp=1"]
    uneven = ["pipeline.schedule=gpipe", "pipeline.stages_per_rank=1", "pipeline.division=[3, 1]"]
    many = train(config, tmp_path / "many", *half, *uneven)
    assert many == pytest.approx(alone(config, tmp_path / "one", *whole), rel=1e-5)


# How runs end

SCHEDULE = """\
import os
from pathlib import Path

from schedir import B, F


def mine(rank, ranks, microbatches):
    Path({folder!r}, os.environ.get("RANK", "parent")).write_text(str(os.getpid()))
    return microbatches * (F + B)
"""


@pytest.fixture
def endless(config: str, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A run of two ranks under way, and their process ids."""
    folder = tmp_path / "pids"
    folder.mkdir()
    schedule = tmp_path / "mine.py"
    schedule.write_text(SCHEDULE.format(folder=str(folder)))
    sets = ["train.steps=1000000", "train.log_every=1", "train.timeout=10", "pipeline.tp=1",
            "pipeline.stages_per_rank=1", f"pipeline.schedule={schedule}:mine"]  # fmt: skip
    process = start([sys.executable, "-m", "schedir", *arguments(config, tmp_path / "out", *sets)])
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline().startswith("step "), process.stderr.read()
    yield process, [int((folder / rank).read_text()) for rank in "01"]
    process.kill()


def gone(pid: int) -> bool:
    """Whether a process has ended, though nobody may have asked how."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return state.stdout.strip()[:1] in ("", "Z")


@pytest.mark.parametrize(
    ("to", "what", "code", "said"),
    [
        ("rank 1", signal.SIGKILL, 1, "rank 1 was ended by signal 9"),
        ("rank 1", signal.SIGSTOP, 1, "rank 0: mine: "),
        ("launcher", signal.SIGINT, 130, ""),
        ("launcher", signal.SIGKILL, -signal.SIGKILL, ""),
    ],
)
def test_all_end_together(
    endless: tuple[subprocess.Popen[str], list[int]],
    to: str,
    what: signal.Signals,
    code: int,
    said: str,
) -> None:
    process, pids = endless
    os.kill(pids[1] if to == "rank 1" else process.pid, what)
    got, _, err = finish(process)
    assert got == code and said in err
    assert err.count("\n") <= 3 and "Traceback" not in err
    deadline = time.monotonic() + LIMIT
    while not all(map(gone, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


# Refusals


@pytest.mark.parametrize(
    ("setting", "kind"),
    [
        ("pipeline.tp=3", ConfigError),
        ("pipeline.ranks=3", ConfigError),
        ("pipeline.schedule=gpip", UsageError),
        ("pipeline.schedule=gpipe", ProgramError),  # it leaves out the second stages
        ("pipeline.dp=1000", UsageError),
        ("data.source=no-such-file.txt", UsageError),
        ("model.vocab=100", UsageError),  # the text has bytes above
        ("model.context=100000", UsageError),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    config: str, tmp_path: Path, setting: str, kind: type[ProgramError]
) -> None:
    with pytest.raises(kind):
        run(config, [setting, f'output.folder="{tmp_path / "out"}"'])
    assert not (tmp_path / "out" / "loss.csv").exists()


def test_an_output_folder_that_cannot_be_written_is_refused(config: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    command = [sys.executable, "-m", "schedir", *arguments(config, file / "out")]
    code, out, err = finish(start(command))
    assert (code, out) == (2, "") and str(file / "out") in err and "Traceback" not in err


def test_a_program_file_must_fit_the_configuration(config: str, tmp_path: Path) -> None:
    import schedir

    program = schedir.compile(schedir.schedules.gpipe, schedir.Plan(1, 3), model="edge")
    path = tmp_path / "program.sched"
    path.write_text(schedir.show(program))
    plain = tmp_path / "plain.toml"
    plain.write_text(f"[pipeline]\nschedule = '{path}'\n")
    with pytest.raises(UsageError) as error:
        run(str(plain))
    assert "clip" in error.value.fact
    forward = schedir.compile(lambda r, P, m: m * schedir.F, schedir.Plan(1, 3))
    path.write_text(schedir.show(forward).replace("<lambda>", "forward"))
    with pytest.raises(ProgramError):
        run(str(plain), ["train.clip=0"])


def test_a_rank_without_a_world_is_refused(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UsageError) as error:
        run(config)
    assert "MASTER_ADDR" in error.value.fact


def test_a_wrong_number_of_processes_is_one_error(config: str, tmp_path: Path) -> None:
    agent = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "schedir"]
    code, _, err = finish(start([*agent, *arguments(config, tmp_path / "out")]))
    assert code != 0
    assert err.count("2 processes do not make pp 2 x tp 2 x dp 1") == 1


def test_training_is_what_a_plain_loop_does(config: str, tmp_path: Path) -> None:
    """Against torch's own clipping and AdamW: learning rates, betas, decay and clipping arrive."""
    import torch

    from schedir import gpt
    from schedir.config import read
    from schedir.trainer import batches

    sets = [*ALONE, "train.betas=[0.5, 0.7]", "train.clip=0.3", "train.weight_decay=0.4",
            "train.lr=0.02", f'output.folder="{tmp_path}/out"']  # fmt: skip
    assert run(config, sets) == 0
    told = read(config, sets)
    model = gpt.build_stage(told.model, 0, 1)
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.4},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.5, 0.7))
    rates = [0.01, 0.02, 0.02, *(told.train.learning_rate(k) for k in (3, 4, 5))]
    expected = []
    for step, rate in enumerate(rates):
        for group in optimizer.param_groups:
            group["lr"] = rate
        inputs, targets = batches(told).batch(step)
        optimizer.zero_grad()
        loss = gpt.loss(model(inputs), targets) / targets.numel()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 0.3)
        assert norm > 0.3  # or clipping would not be seen
        optimizer.step()
        expected.append((float(loss.detach()), rate, float(norm)))
    with (tmp_path / "out" / "loss.csv").open() as file:
        rows = [list(map(float, row.values())) for row in csv.DictReader(file)]
    for (_, *row), wants in zip(rows, expected, strict=True):
        assert row == pytest.approx(wants, rel=1e-4)
