"""Tests of untrusted files: one short error, quickly, in little memory, and no code is run."""

from __future__ import annotations

import gzip
import json
import os
import re
import socket
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from zipfile import ZipFile

import pytest
from hypothesis import given
from hypothesis import strategies as st

import schedir
from schedir.__main__ import main
from schedir.errors import ConfigError, ParseError, ShapeError, UsageError
from schedir.io.black_box import BlackBoxSnapshot, read_black_boxes
from schedir.ir.input_trust import DEFAULT_MAX_INSTRUCTIONS
from schedir.ir.program import Program
from schedir.schedules.schedule_algebra import F
from schedir.testing import compute_programs
from schedir.training.config.config_file import read_config
from tests.limited_process import CommandResult, run_limited

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits as Linux has them")

# Kind of file -> the command that reads it, and the suffix of the file.
WAYS = {
    "program": ("check {}", ".sched"),
    "run": ("explain {}", ".timeline"),
    "code": ("check {}:mine", ".py"),
    "costs": ("simulate gpipe --costs @{}", ".txt"),
    "sizes": ("simulate gpipe --sizes @{}", ".txt"),
    "cluster": ("simulate gpipe --sizes activation=1 --cluster {}", ".toml"),
    "csv": ("import {} -o out.sched", ".csv"),
    "trace": ("import {} -o out.timeline", ".json"),
    "dump": ("diagnose {}", "_0"),
    "configuration": ("train {}", ".toml"),
}


def make_argv(way: str, path: str) -> list[str]:
    return [word.format(path) for word in WAYS[way][0].split()]


def is_short_error(result: CommandResult) -> bool:
    """Return whether a command ended with a single error message of schedir."""
    return (
        result.code == 2
        and re.match(r"\w+Error: ", result.text) is not None
        and is_short(result.text)
    )


def is_short(text: str) -> bool:
    return "Traceback" not in text and len(text.splitlines()) <= 6 and len(text) < 3000


# ---------------------------------------------------------------- special files


def create_special_files(folder: Path, way: str) -> list[Path]:
    """Create paths that are not regular files, or that cannot be read."""
    end = WAYS[way][1]
    kinds = ("pipe", "zero", "folder", "socket", "closed", "missing", "loop", "endless")
    paths = {name: folder / f"{name}{end}" for name in kinds}
    os.mkfifo(paths["pipe"])
    paths["zero"].symlink_to("/dev/zero")
    paths["folder"].mkdir()
    paths["loop"].symlink_to(paths["loop"])
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(paths["socket"]))
    paths["closed"].write_text("schedir 1\n")
    paths["closed"].chmod(0)
    with paths["endless"].open("wb") as file:
        file.truncate(2**40)  # a sparse file takes no disk space
    return [p for name, p in paths.items() if name != "closed" or not os.access(p, os.R_OK)]


@pytest.mark.parametrize("kind", WAYS)
def test_special_files_are_refused(kind: str, tmp_path: Path) -> None:
    paths = [*map(str, create_special_files(tmp_path, kind)), "x" * 5000 + WAYS[kind][1]]
    if kind == "code":
        paths = [p for p in paths if "endless" not in p]  # Python reads code files
    for path, result in zip(
        paths, run_limited([make_argv(kind, p) for p in paths], tmp_path), strict=True
    ):
        assert is_short_error(result), (path, result)


# ---------------------------------------------------------------- contents of files

DEEP, DIGITS, SPACES = 100_000, "9" * 5000, " " * 500_000
TEXTS = {
    "program": [
        f"schedir 1\nprogram a\nranks {DIGITS}\n",
        f"schedir 1\nprogram a\nranks 1  microbatches 1\ntied {DIGITS}=1\n",
        f"schedir 1\nprogram a\nranks 1  microbatches 1\nrank 0\n  {DIGITS} x  F 0.0\n",
        f"schedir 1\nprogram a\nranks 1  microbatches 1\nrank 0\n  F {DIGITS}.0\n",
        f"schedir 1\nprogram a\nranks 1  microbatches 1\nrank 0\n  {'F 0.0;' * DEEP}\n",
        f"schedir 1\nprogram a\nranks 1  placement {'0,' * DEEP}\n",
        f"schedir 1\nprogram a{SPACES}\nranks{SPACES}\n",
        "schedir 1\nprogram \x1b[2J\x1b]0;owned\x07\nranks \x1b[31m\n",
        # 99 bytes that declare 268 million instructions.
        "schedir 1\nprogram a\nranks 1  microbatches 1048576  stages_per_rank 128\nrank 0\n"
        "  134217728 x  F 0.0\n",
        "schedir 1\nprogram a\nranks 100 microbatches 1000000\nrank 0\n  100000001 x  F 0.0\n",
        "schedir 1\nranks 1  program a\nrank 0\n",
    ],
    "costs": [f"F={DIGITS}", "F=1e999", f"F={'1:' * DEEP}", "F=1,\0=2", f"F={SPACES}x"],
    "sizes": [f"saved={DIGITS}GB", "saved=1e999", f"saved={'1/' * DEEP}"],
    "cluster": [
        "[" * DEEP, "a = " + "[" * DEEP, "a = " + "{b = " * DEEP, f"nodes = {DIGITS}",
        f"nodes = 0x{'f' * 5000}", f"flops = '{DIGITS}'", "nodes = nan", "nodes = 1e999",
        ".".join("a" * DEEP) + " = 1", f"a = '''\n{SPACES}'''\nb = 1", "\x1b[2J",
    ],
    "csv": [f"{DIGITS}F0", f"0F{DIGITS}", "(" * DEEP, '"' + "0F0," * DEEP, "0F0;" * DEEP, "\0"],
    "trace": [
        "[" * DEEP, '{"a":' * DEEP, '{"traceEvents": [' + "[" * DEEP,
        *('{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a", "dur": 1, "ts": ' + ts + "}]}"
          for ts in (DIGITS, "1e999")),
        '{"distributedInfo": {"rank": ' + DIGITS + '}, "traceEvents": []}', "\0",
    ],
    "dump": [
        "[" * DEEP, '{"a":' * DEEP, '{"version": ' + DIGITS + "}",
        '{"version": "2.0", "entries": [' + DIGITS + "]}",
        '{"version": "2.0", "entries": [{"time_created_ns": 1e999}]}',
    ],
    "configuration": [
        "[" * DEEP, "a = " + "[" * DEEP, "a = " + "{b = " * DEEP, f"[pipeline]\nranks = {DIGITS}",
        "[pipeline]\nranks." + ".".join("a" * DEEP) + " = 1", "[train]\nlr = nan",
        "[train]\nlr = 1e999", "[data]\nseed = inf", f"[pipeline]\nranks = [{'1,' * DEEP}]",
        f"[train]\na = '''\n[{SPACES}'''\n",
        '[pipeline]\nschedule = "a\\u0000.sched"', '[pipeline]\nschedule = "a\\u0000.py:f"',
        '[pipeline]\nschedule = "a\\u0000.timeline"', '[pipeline]\nschedule = "\\u0000"',
        f'[pipeline]\nschedule = "gpipe({"(" * DEEP}"',
        f'[pipeline]\nschedule = "gpipe(a={DIGITS})"',
        '[output]\ndir = "a\\u0000"', '[output]\ntrace = "a\\u0000"',
        f'[output]\ndir = "{"x" * 5000}"',
        "[pipeline]\nranks = 1000\nmicrobatches = 1000000",
        '[pipeline]\nschedule = "interleaved"\nranks = 32768\nmicrobatches = 1048576',
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", TEXTS)
def test_hostile_file_content_is_refused_quickly(kind: str, tmp_path: Path) -> None:
    commands = []
    for k, text in enumerate(TEXTS[kind]):
        path = tmp_path / f"{k}{WAYS[kind][1]}"
        path.write_text(text)
        commands.append(make_argv(kind, str(path)))
    for text, result in zip(TEXTS[kind], run_limited(commands, tmp_path), strict=True):
        assert is_short_error(result), (text[:80], result)
        assert "\x1b" not in result.text


def test_compression_bomb_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rank0.json.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b'{"a": [')
        for _ in range(40):
            file.write(b"[]," * 2**19)
    assert path.stat().st_size < 2**20
    path.rename(tmp_path / "rank0.json")
    (result,) = run_limited([["import", "rank0.json", "-o", "out.timeline"]], tmp_path)
    assert "it took too long" not in result.text and is_short_error(result), result


def test_timeline_without_times_is_refused_before_unfolding(tmp_path: Path) -> None:
    n = 2**23
    header = {
        "schedir_timeline": 1, "instructions": n, "digest": "", "kind": "predicted", "unit": "",
        "progress_model": "per_edge", "clock_error": 0,
    }  # fmt: skip
    rows = "".join(f"  1048576 x  F {s}.0+1; B {s}.0+1\n" for s in range(4))
    with ZipFile(tmp_path / "a.timeline", "w") as archive:
        archive.writestr("header.json", json.dumps(header))
        head = "schedir 1\nprogram a\nranks 1  microbatches 1048576  stages_per_rank 4\nrank 0\n"
        archive.writestr("program.sched", head + rows)
        archive.writestr("start.npy", b"")
        archive.writestr("end.npy", b"")
    commands = [["explain", "a.timeline"], ["explain", "a.timeline", "--max-instructions=1000"]]
    without_times, over_limit = run_limited(commands, tmp_path)
    assert is_short_error(without_times)
    assert "start.npy has 0 bytes, not 33554432" in without_times.text
    assert is_short_error(over_limit)
    assert "8388608 instructions, but a program may have at most 1000" in over_limit.text


def test_black_box_must_be_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "0")
    (tmp_path / "1").symlink_to("/dev/zero")
    (tmp_path / "2").write_bytes(b"\0" * 16384)
    assert read_black_boxes(tmp_path) == {}
    assert BlackBoxSnapshot.from_bytes("\u00b2 runs\n".encode() + b"\0" * 16384) is None


# ---------------------------------------------------------------- sizes, and code


def test_max_instructions_option_sets_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = ["--ranks", "4", "--microbatches", "30"]
    assert main(["check", "gpipe", *shape, "--max-instructions", "100"]) == 2
    error = capsys.readouterr().err
    assert "4 stages x 30 microbatches need at least 120" in error and "the limit is 100" in error
    assert main(["check", "gpipe", *shape, "--max-instructions", "130"]) == 2
    assert "the limit is 130" in capsys.readouterr().err  # a draft has 240
    assert main(["print", "gpipe", *shape, "--compute-only", "--max-instructions", "240"]) == 0
    assert main(["check", "gpipe", *shape, "--max-instructions", "599"]) == 2
    assert main(["check", "gpipe", *shape, "--max-instructions", "600"]) == 0
    path = tmp_path / "a.sched"
    assert main(["print", "gpipe", *shape, "-o", str(path)]) == 0
    assert main(["check", str(path), "--max-instructions", "200"]) == 2
    assert main(["check", str(path), "--max-instructions", "10000"]) == 0


def test_input_limits_apply_to_programs_built_in_python() -> None:
    assert schedir.PipelineShape(1000, 3 * DEFAULT_MAX_INSTRUCTIONS // 1000).stages == 1000
    with schedir.input_limits(max_instructions=2 * DEFAULT_MAX_INSTRUCTIONS):
        assert schedir.PipelineShape(1000, DEFAULT_MAX_INSTRUCTIONS // 999).stages == 1000
        with schedir.input_limits(allow_code=False), pytest.raises(ShapeError):
            schedir.PipelineShape(1000, 3 * DEFAULT_MAX_INSTRUCTIONS // 1000)
        with pytest.raises(ValueError, match=f"limit of {2 * DEFAULT_MAX_INSTRUCTIONS}"):
            (2 * DEFAULT_MAX_INSTRUCTIONS + 1) * F
    assert len((2 * DEFAULT_MAX_INSTRUCTIONS + 1) * F) == 2 * DEFAULT_MAX_INSTRUCTIONS + 1
    with pytest.raises(UsageError), schedir.input_limits(max_instructions=0):
        pass


HEAD = "schedir 1\nprogram a\nranks 1  microbatches 1048576  stages_per_rank 32\nrank 0\n"


def make_unfolding_text(stages: int) -> str:
    """Return a text in which each line has 2 * 2^20 instructions."""
    return HEAD + "".join(f"  1048576 x  F {s}.0+1; B {s}.0+1\n" for s in range(stages))


def test_small_file_with_many_instructions_is_refused(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.sched").write_text(make_unfolding_text(32))
    (tmp_path / "a.toml").write_text("[pipeline]\nranks = 4\nmicrobatches = 1000000\n")
    commands = [["check", "a.sched"], ["train", "a.toml"]]
    commands += [["check", "interleaved", "--ranks=2", "--microbatches=1000000"]]
    for result in run_limited(commands, tmp_path):
        assert is_short_error(result)
        assert str(DEFAULT_MAX_INSTRUCTIONS) in result.text
        assert "--max-instructions" in result.text


def test_limit_counts_no_backwards_of_forward_only() -> None:
    """With backwards the schedule would exceed the limit."""
    schedule = ["forward_only", "--ranks=8", "--microbatches=120", "--stages-per-rank=2"]
    assert main(["check", *schedule, "--max-instructions=5520"]) == 0
    assert main(["check", *schedule, "--max-instructions=5519"]) == 2


def test_files_have_limit_in_python(tmp_path: Path) -> None:
    text = make_unfolding_text(32)
    tracemalloc.start()
    with pytest.raises(ParseError) as caught:
        schedir.from_text(text)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20 and "--max-instructions" in caught.value.hint
    (tmp_path / "a.toml").write_text("[pipeline]\nranks = 4\nmicrobatches = 1000000\n")
    with pytest.raises(ConfigError) as wrong:
        read_config(str(tmp_path / "a.toml"))
    assert "--max-instructions" in wrong.value.hint and wrong.value.line == 3
    with schedir.input_limits(max_instructions=10**9):
        assert read_config(str(tmp_path / "a.toml")).pipeline.microbatches == 1000000


@given(compute_programs(), st.integers(0, 2))
def test_program_within_limit_is_never_refused(draft: Program, frozen_stages: int) -> None:
    frozen_stages = min(frozen_stages, draft.shape.stages - 1)
    program = schedir.compile(replace(draft, frozen_stages=frozen_stages))
    with schedir.input_limits(max_instructions=len(program)):
        schedir.compile(replace(draft, frozen_stages=frozen_stages))
        program.shape.require_lowered_limit(
            has_backward=program.has_backward, frozen_stages=program.frozen_stages
        )


CODE = """
from pathlib import Path
from schedir.schedules import one_f_one_b as mine
Path("ran").touch()
"""


@pytest.mark.parametrize(
    "command",
    [
        "print {}", "check {}", "simulate {}", "draw {} -o a.svg", "compare gpipe {}",
        "explain {}", "recommend {}", "export {} --to torch -o a.csv",
        "diagnose dump_0 --program {}",
        "search {}", "check {} --rank-programs 1:{}", "train a.toml", "train b.toml",
        "train c.toml --set pipeline.schedule={}",
    ],
)  # fmt: skip
def test_no_code_option_runs_no_file(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("stranger.py").write_text(CODE)
    Path("a.toml").write_text('[pipeline]\nschedule = "stranger.py:mine"\n')
    Path("b.toml").write_text('[pipeline]\nschedule = "stranger.py:mine()"\n')
    Path("c.toml").write_text("")
    Path("dump_0").write_text(json.dumps({"version": "2.0", "entries": []}))
    argv = command.format(*["stranger.py:mine"] * 2).split()
    main([*argv, "--no-code"])
    assert not Path("ran").exists()
    error = capsys.readouterr().err
    if argv[0] not in ("recommend", "search"):  # these take no schedule from a file
        assert "stranger.py is Python code" in error
    assert main(["check", "stranger.py:mine"]) == 0 and Path("ran").exists()


def test_help_warns_about_code_in_schedules(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert (
        "if its schedule is file.py:function, schedir executes file.py, unless --no-code is given"
        in output
    )
