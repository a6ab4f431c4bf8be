"""Tests of bad input to the command line: exit code 2, and one message that names the error.

`golden/refused_commands.txt` contains commands, each with its message. To add a command, add the
line `$ schedir ...`, and run this file with UPDATE_GOLDEN=1.
"""

import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from schedir import save_timeline
from schedir.compiler.compile import compile
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.text_format import to_text
from schedir.predict.simulate import simulate
from schedir.schedules import gpipe, one_f_one_b
from schedir.schedules.schedule_expansion import expand_schedule
from tests.commands import run_refused_command

GOLDEN = Path(__file__).parents[1] / "golden" / "refused_commands.txt"
SCHEDULES_SOURCE = """
from schedir import B, F
from schedir.schedules.schedule_algebra import with_weight_delay

ANSWER = 42

def in_pairs(rank, ranks, microbatches):
    return microbatches // 2 * (2 * F + 2 * B)

def broken(rank, ranks, microbatches):
    return microbatches * F / rank

def silent(rank, ranks, microbatches):
    pass

def greedy(rank, ranks, microbatches):
    return microbatches * (F[1] + B[1])

def half(rank, ranks, microbatches):
    return microbatches * F + (microbatches - 1) * B

def stuck(rank, ranks, microbatches):
    order = range(microbatches) if rank else reversed(range(microbatches))
    for mb in order:
        yield F.at(mb) + B.at(mb)

def named(rank, ranks, microbatches, file="x"):
    return microbatches * (F + B)

@with_weight_delay([1, 0])
def staggered(rank, ranks, microbatches):
    return microbatches * (F + B)

class Odd(BaseException):
    pass

def odd(rank, ranks, microbatches):
    raise Odd('bad')
"""


HEADER = "schedir 1\nprogram p\nranks 1 microbatches"
MARKED_SCHEDULE = """\
from schedir.schedules.schedule_algebra import {mark}

@{mark}
def f(r, P, m):
    pass
"""
MEGATRON = """\
torchrun pretrain_gpt.py --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32
"""
FILES = {
    "mine.py": SCHEDULES_SOURCE,
    "syntax.py": "def f(:\n",
    "raises.py": "\n1 / 0\n",
    "exits.py": "raise SystemExit(3)\n",
    "quits.py": "raise GeneratorExit\n",
    "delayed.py": MARKED_SCHEDULE.format(mark="with_weight_delay"),
    "placed.py": MARKED_SCHEDULE.format(mark="with_placement"),
    "typo.sched": f"{HEADER} 1\nrank 0\n  G 0.0\n",
    "zero.sched": f"{HEADER} 0\nrank 0\n",
    "half.sched": f"{HEADER} 2\nrank 0\n  F 0.0; F 0.1; B 0.0\n",
    "twice.sched": f"{HEADER} 2\nrank 0\n  2x F 0.0+; B 0.0+\n",
    "starred.sched": f"{HEADER} 2\nrank 0\n  2 * F 0.0+\n",
    "empty.sched": "",
    "c.toml": "[pipeline]\nranks = \N{ARABIC-INDIC DIGIT TWO}\n",
    "d.toml": "[pipeline]\nmicrobatches = 4\n",
    "empty.toml": "",
    "mine.toml": "[pipeline]\nranks = 2\n",
    "cluster.toml": "nodes = 2\ngpus_per_node = 8\n",
    "costs.json": '{"F": 1, "B": 2}',
    "meg.sh": MEGATRON,
    "one.csv": "1F0,1B0\n2F0,2B0\n",
    "good.csv": "0F0,0B0\n1F0,1B0\n",
    "sends.csv": "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n",
    "bad.csv": "0F0,0B0\n1F0,1B\n",
    "half.csv": "0F0,0B0\n1F0\n",
    "stuck.csv": "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n",
    "loud.py": "def f(r, P, m):\n    raise RuntimeError('built')\n",
    "broken.toml": "nodes = \n",
}
SELENE = (Path(__file__).parents[2] / "examples" / "selene.toml").read_text()
# Name of a wrong file of a cluster -> the text to replace, and the new text.
CLUSTERS = {
    "selene": ("", ""), "bits": ("25GB/s", "200Gb/s"), "negative": ('"80GB"', "-80e9"),
    "misspelt": ("nvlink_bandwidth", "nvlnk_bandwidth"),
    "less": ("network_bandwidth", "# network_bandwidth"),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with good and bad files."""
    folder = tmp_path_factory.mktemp("files")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    for name, (old, new) in CLUSTERS.items():
        (folder / f"{name}.toml").write_text(SELENE.replace(old, new))
    small = compile(one_f_one_b, PipelineShape(2, 2))
    (folder / "mine.sched").write_text(to_text(small))
    save_timeline(simulate(small), folder / "mine.timeline")
    large = compile(one_f_one_b, PipelineShape(4, 8), tp=2, clip_grad_norm=True)
    for name in ("f.sched", "program.txt"):
        (folder / name).write_text(to_text(large))
    sharded = compile(one_f_one_b, PipelineShape(2, 2), dp=2, zero=3)
    (folder / "parts.sched").write_text(to_text(sharded))
    draft = expand_schedule(gpipe, PipelineShape(2, 2))
    (folder / "d.sched").write_text(to_text(draft))
    (folder / "folder.sched").mkdir()
    (folder / "binary.sched").write_bytes(b"\xff\xfe\x00")
    (folder / "zip.csv").write_bytes(b"PK\x03\x04\xff")
    return folder


@pytest.fixture(autouse=True)
def _enter_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.chdir(folder)


@pytest.mark.parametrize("value", ["0", "-1", "x", "1.5", "", "1000000000", "9" * 5000])
@pytest.mark.parametrize("option", ["--microbatches", "--ranks", "--stages-per-rank"])
def test_wrong_counts_are_refused(
    capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    err = run_refused_command(capsys, "print", "gpipe", option, value)
    assert option.strip("-").replace("-", "_") in err.replace("-", "_")


def test_golden_commands_are_refused_with_message(capsys: pytest.CaptureFixture[str]) -> None:
    """No file changes, and no file is new."""
    before = read_change_times()
    cases = []
    for line in re.findall(r"^\$ schedir (.*)$", GOLDEN.read_text(), re.M):
        error = run_refused_command(capsys, *shlex.split(line))
        cases.append(f"$ schedir {line}\n{re.sub('0x[0-9a-f]+', '0x...', error)}")
        assert read_change_times() == before, line
    if "UPDATE_GOLDEN" in os.environ:
        GOLDEN.write_text("\n".join(cases))
    assert "\n".join(cases) == GOLDEN.read_text()


def read_change_times() -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in Path().iterdir()}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
@pytest.mark.parametrize("name", ["x.sched", "x.png"])
def test_named_pipe_is_not_replaced(capsys: pytest.CaptureFixture[str], name: str) -> None:
    os.mkfifo(name)
    which = "print" if name.endswith("sched") else "draw"
    assert name in run_refused_command(capsys, which, "gpipe", "-o", name)
    assert Path(name).is_fifo()
