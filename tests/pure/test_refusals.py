"""Tests of bad input to the command line: exit code 2, and one message that names the error."""

import os
from pathlib import Path

import pytest

from schedir.compiler.compile import compile
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.text_format import to_text
from schedir.schedules import one_f_one_b
from tests.commands import run_refused_command

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


@pytest.fixture(scope="module")
def program_text() -> str:
    return to_text(compile(one_f_one_b, PipelineShape(4, 8), tp=2, clip_grad_norm=True))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program_text: str) -> None:
    """Start every test in its own folder, with good and bad files in it."""
    monkeypatch.chdir(tmp_path)
    Path("f.sched").write_text(program_text)
    Path("mine.py").write_text(SCHEDULES_SOURCE)
    Path("folder.sched").mkdir()
    Path("binary.sched").write_bytes(b"\xff\xfe\x00")
    header = "schedir 1\nprogram p\nranks 1 microbatches"
    Path("typo.sched").write_text(f"{header} 1\nrank 0\n  G 0.0\n")
    Path("zero.sched").write_text(f"{header} 0\nrank 0\n")
    Path("half.sched").write_text(f"{header} 2\nrank 0\n  F 0.0; F 0.1; B 0.0\n")
    Path("twice.sched").write_text(f"{header} 2\nrank 0\n  2x F 0.0+; B 0.0+\n")
    Path("starred.sched").write_text(f"{header} 2\nrank 0\n  2 * F 0.0+\n")
    Path("program.txt").write_text(program_text)
    Path("empty.sched").write_text("")
    Path("syntax.py").write_text("def f(:\n")
    Path("raises.py").write_text("\n1 / 0\n")
    Path("exits.py").write_text("raise SystemExit(3)\n")
    Path("quits.py").write_text("raise GeneratorExit\n")
    for file, mark in (("delayed", "with_weight_delay"), ("placed", "with_placement")):
        Path(f"{file}.py").write_text(
            f"from schedir.schedules.schedule_algebra import {mark}\n"
            f"@{mark}\ndef f(r, P, m): pass\n"
        )
    Path("c.toml").write_text("[pipeline]\nranks = ٢\n")
    Path("d.toml").write_text("[pipeline]\nmicrobatches = 4\n")


@pytest.mark.parametrize("value", ["0", "-1", "x", "1.5", "", "1000000000", "9" * 5000])
@pytest.mark.parametrize("option", ["--microbatches", "--ranks", "--stages-per-rank"])
def test_wrong_counts_are_refused(
    capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    err = run_refused_command(capsys, "print", "gpipe", option, value)
    assert option.strip("-").replace("-", "_") in err.replace("-", "_")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("shwo gpipe", "'shwo'"),
        ("print", "SCHEDULE"),
        ("print gpipe --rank 4", "--rank"),
        ("print gpip", "'gpipe'"),
        ("print zzz", "one_f_one_b"),
        ("print 1F1B", "'one_f_one_b'"),
        ("print GPipe", "'gpipe'"),
        ("print dualpipe-v", "'dualpipe_v'"),
        ("print _groups", "'_groups'"),
        ("print mine.py", "mine.py:NAME"),
        ("print mine.py:in_pair", "'in_pairs'"),
        ("print mine.py:ANSWER", "'ANSWER'"),
        ("print mine.py:", "in_pairs"),
        ("print missing.py:f", "missing.py"),
        ("print missing.sched", "missing.sched"),
        ("print x.csv", "import x.csv"),
        ("print folder.sched", "folder.sched"),
        ("print binary.sched", "byte 0"),
        ("print typo.sched", "line 5, column 3"),
        ("print typo.sched", "in typo.sched"),
        ("print empty.sched", "in empty.sched"),
        ("print zero.sched", "in zero.sched"),
        ("print syntax.py:f", "syntax.py, line 1"),
        ("print raises.py:f", "raises.py:2: 1 / 0"),
        ("print exits.py:f", "SystemExit"),
        ("print mine.py:broken", "return microbatches * F / rank"),
        ("print mine.py:silent", "rank 0"),
        ("print mine.py:greedy", "F[1]"),
        ("print mine.py:half --ranks 1", "half"),
        ("print mine.py:stuck --ranks 2 --microbatches 2", "DeadlockError"),
        ("print gpipe -o x.txt", "x.txt"),
        ("print gpipe -o no/such/x.sched", "no/such/x.sched"),
        ("print gpipe -o folder.sched", "folder.sched"),
        ("draw gpipe --idle-map", "-o"),
        ("draw gpipe -o x.gif", "x.gif"),
        ("draw gpipe -o no/such/x.png", "no/such/x.png"),
        ("compare gpipe -o x", "must end in .png or .svg or .pdf, not 'x'"),
        ("compare", "SCHEDULE"),
        ("print gpipe -O tp=0", "-O tp"),
        ("print gpipe -O dp=-3", "-O dp"),
        ("print gpipe -O tp=99999999999", "-O tp"),
        ("print gpipe --placement ring", "'ring'"),
        ("print gpipe --placement 0,1,x", "'0,1,x'"),
        ("print gpipe --placement 0,9", "rank 9"),
        ("print gpipe --progress-model tcp", "'tcp'"),
        ("print f.sched --progress-model tcp", "'tcp'"),
        ("print gpipe --compute-only --progress-model tcp", "'tcp'"),
        ("print mine.py:x.sched", "'x.sched'"),
        ("check f.sched --progress-model tcp", "'tcp'"),
        ("print gpipe --costs Q=1", "'Q'"),
        ("print gpipe --costs sned=1", "'send'"),
        ("print gpipe --costs F", "F must be"),
        ("print gpipe --costs F=", "F must be"),
        ("print gpipe --costs F=a", "'a'"),
        ("print gpipe --costs F=1,F=2", "F is given twice"),
        ("print gpipe --costs F=-1", "F"),
        ("print gpipe --costs F=nan", "F"),
        ("print gpipe --costs F=1:2", "4 stages"),
        ("print f.sched --ranks 8", "f.sched has ranks 4, not 8"),
        ("check f.sched --ranks 8", "leave out --ranks, or compile the schedule again"),
        ("check f.sched --microbatches 9", "microbatches 8"),
        ("simulate f.sched --stages-per-rank 2", "--stages-per-rank"),
        ("draw f.sched --placement vee -o x.png", "placement loop"),
        ("check f.sched -O tp=4", "tp 2"),
        ("check f.sched -O tied_weights", "tied_weights no"),
        ("compare f.sched --ranks 8", "ranks 4"),
        ("print f.sched --compute-only", "--compute-only"),
        ("simulate half.sched", "CompletenessError"),
        # Digits of other scripts, and Python's own notations of numbers.
        ("print gpipe --ranks ٢", "--ranks: '٢' is not an integer in the digits"),
        ("print gpipe --microbatches 1_6", "--microbatches"),
        ("print gpipe -O tp=٢", "-O tp"),
        ("print gpipe --placement ٢,٣ --ranks 2", "'٢,٣'"),
        ("print gpipe --costs F=٣", "'٣'"),
        ("print gpipe --costs F=1_0", "'1_0'"),
        ("print gpipe --sizes saved=٣GB", "'٣GB'"),
        ("print gpipe --sizes saved=1 --memory-limit ٣GB", "'٣GB'"),
        ("draw gpipe -o x.png --width ٣", "'٣'"),
        ("train c.toml", "c.toml, line 2, column 9"),
        ("train d.toml --set pipeline.ranks=٢", "pipeline.ranks must be an integer"),
        # Arguments in brackets, and code above a schedule.
        ("print mine.py:named(file=x)", """"mine.py:named(file='x')\""""),
        ("print mine.py:named(file=a.txt)", """file='a.txt'"""),
        ("print mine.py:named(file=a/b)", "is not a value"),
        ("print mine.py:named(file=/a)", "put text in quotes"),
        ("print mine.py:named(file={[]:1})", "is not a value"),
        ("print delayed.py:f", "@with_weight_delay takes an integer"),
        ("print placed.py:f", "@with_placement takes a placement"),
        ("print quits.py:f", "quits.py:1: raise GeneratorExit"),
        ("print mine.py:staggered -O optimizer_steps=2", "2 numbers for 4 stages"),
        ("print mine.py:odd", "raise Odd('bad')"),
        # Wrong separators and brackets, and options of other trainers.
        ("check interleaved[group=4]", "in round brackets: 'interleaved(group=4)'"),
        ("check gpipe --sizes saved=1.2 GB", "a number of bytes without a space: 40GB"),
        ("simulate gpipe --memory-limit 40 GiB", "a number of bytes without a space: 40GiB"),
        ("draw gpipe -o x.svg --show lanes;path", "not 'lanes;path'\n  hint: such as lanes,arrows"),
        ("plan --schedules gpipe;zb_h1", "names with commas between them, not 'gpipe;zb_h1'"),
        (
            "plan --tp 4:8",
            "must be an integer, or integers with commas between them like 4,8",
        ),
        ("check twice.sched", "hint: did you mean '2 x  F 0.0+'?"),
        ("check starred.sched", "hint: did you mean '2 x  F 0.0+'?"),
        ("check program.txt", "the name of a program must end in .sched, and that of a run in"),
        (
            "train f.sched",
            "f.sched is not a configuration, which is a TOML file\n  hint: the setting",
        ),
        ("train mine.py", "hint: the setting pipeline.schedule"),
        ("check gpipe --config f.sched", "f.sched is not a configuration, which is a TOML file"),
        ("train d.toml --train.lr 3e-4", "--set train.lr=VALUE, or lr in [train] of the file"),
        ("train d.toml --data.seed 1", "--set data.seed=VALUE, or seed in [data] of the file"),
        ("train d.toml --training.steps 9", "--set train.steps=VALUE, or steps in [train]"),
        ("train d.toml --kv-heads 4", "--set model.kv_heads=VALUE, or kv_heads in [model]"),
    ],
)
def test_wrong_arguments_are_refused(
    capsys: pytest.CaptureFixture[str], argv: str, message: str
) -> None:
    before = {path.name for path in Path().iterdir()}
    assert message in run_refused_command(capsys, *argv.split())
    assert {path.name for path in Path().iterdir()} - {"__pycache__"} == before


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
@pytest.mark.parametrize("name", ["x.sched", "x.png"])
def test_named_pipe_is_not_replaced(capsys: pytest.CaptureFixture[str], name: str) -> None:
    os.mkfifo(name)
    which = "print" if name.endswith("sched") else "draw"
    assert name in run_refused_command(capsys, which, "gpipe", "-o", name)
    assert Path(name).is_fifo()


def test_refused_write_keeps_old_file(capsys: pytest.CaptureFixture[str]) -> None:
    before = Path("f.sched").read_text()
    run_refused_command(capsys, "print", "mine.py:half", "-o", "f.sched")
    assert Path("f.sched").read_text() == before


def test_too_large_count_is_refused_before_build(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("loud.py").write_text("def f(r, P, m):\n    raise RuntimeError('built')\n")
    assert "built" not in run_refused_command(
        capsys, "print", "loud.py:f", "--microbatches", "1000000000"
    )


def test_single_stage_schedule_hints_at_alternatives(capsys: pytest.CaptureFixture[str]) -> None:
    err = run_refused_command(capsys, "check", "gpipe", "--stages-per-rank", "2")
    assert "F 4.0 is missing on rank 0" in err and "gpipe has one stage per rank; use " in err
    assert "hint: gpipe has one stage per rank; use interleaved or" in err
    vee = run_refused_command(capsys, "check", "gpipe", "--placement", "vee")
    fitting = "dualpipe_v or looped_bfs or looped_dfs or v_half or v_min or wave or zb_v"
    assert f"hint: gpipe has one stage per rank; use {fitting}\n" in vee + "\n"
    Path("one.py").write_text(
        "from schedir import B, F\n\n\ndef f(r, P, m):\n    return m * (F + B)\n"
    )
    error = run_refused_command(capsys, "check", "one.py:f", "--stages-per-rank", "2")
    assert "add F[1] and B[1]" in error
    assert "F[1]" not in run_refused_command(capsys, "check", "mine.py:half")
