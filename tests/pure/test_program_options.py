"""Tests of `-O NAME=VALUE`, `--config`, examples in the help, and hints for retired names."""

from __future__ import annotations

import pickle
import shlex
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import schedir
from schedir.__main__ import _build_parser, main
from schedir.commands import COMMANDS, import_command
from schedir.commands.common.program_options import PROGRAM_OPTIONS, parse_option, read_config
from schedir.errors import SchedirError, TraceError, UsageError
from schedir.io.option_spelling import FIELDS_WITH_FLAGS
from schedir.retired_names import RENAMED_ATTRIBUTES
from tests.commands import run_command, run_refused_command

ROOT = Path(__file__).resolve().parents[2]
# Values of some options, as text and as arguments of compile.
VALUES: dict[str, list[tuple[str, Any]]] = {
    "tp": [("2", 2)],
    "dp": [("2", 2), ("3", 3)],
    "zero": [("0", 0), ("1", 1), ("3", 3)],
    "tied_weights": [("yes", True), ("no", False), ("0=3,1=2", ((0, 3), (1, 2)))],
    "frozen_stages": [("1", 1)],
    "overlap": [("yes", True), ("no", False)],
    "buffer_sharing": [("minimal", "minimal"), ("latency_preserving", "latency_preserving")],
    "recompute": [("all", "all"), ("half", "half")],
    "offload": [("half", "half")],
    "sequence_parallel": [("no", False)],
}


@st.composite
def draw_options(draw: st.DrawFn) -> dict[str, tuple[str, Any]]:
    option_names = draw(st.lists(st.sampled_from(sorted(VALUES)), unique=True, max_size=4))
    return {name: draw(st.sampled_from(VALUES[name])) for name in option_names}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(draw_options())
def test_option_equals_compile_keyword(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: dict[str, tuple[str, Any]]
) -> None:
    """An option and its keyword give the same program, or both give an error."""
    file = tmp_path / "x.sched"
    option_words = [
        word for name, (text, _) in options.items() for word in ("-O", f"{name}={text}")
    ]
    shape = ["--ranks", "4", "--microbatches", "8"]
    code = main(["compile", "one_f_one_b", *shape, *option_words, "-o", str(file)])
    capsys.readouterr()
    given_: dict[str, Any] = {name: value for name, (_, value) in options.items()}
    try:
        program = schedir.compile("one_f_one_b", ranks=4, microbatches=8, **given_)
    except schedir.errors.SchedirError:
        assert code == 2
    else:
        assert code == 0 and schedir.from_text(file.read_text()) == program


@pytest.mark.parametrize("name", PROGRAM_OPTIONS)
def test_each_option_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert PROGRAM_OPTIONS[name].help
    assert name in FIELDS_WITH_FLAGS or f"-O {name}" in run_command(capsys, "options", name)
    if not PROGRAM_OPTIONS[name].kind.metavar:
        assert parse_option(name) == (name, True)


def test_config_file_sets_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[pipeline]\ntp = 2\noverlap = true\n[memory]\nrecompute = "all"\n')
    assert read_config(str(file)) == {"tp": 2, "overlap": True, "recompute": "all"}
    shape = ("--ranks", "2", "--microbatches", "4")
    by_file = run_command(capsys, "print", "gpipe", *shape, "--config", str(file))
    option_words = ("-O", "tp=2", "-O", "overlap", "-O", "recompute=all")
    assert by_file == run_command(capsys, "print", "gpipe", *shape, *option_words)
    overriding_tp = ("-O", "tp=4")  # typed options take precedence over the file in any order
    for options in (
        (*overriding_tp, "--config", str(file)),
        ("--config", str(file), *overriding_tp),
    ):
        assert "tp 4" in run_command(capsys, "print", "gpipe", *shape, *options)
    file.write_text("[pipeline]\ntp = 4\nzero = 3\ndp = 2\noverlap = true\n")
    overriding = ("-O", "zero=0", "-O", "overlap=no")
    plain = run_command(capsys, "print", "gpipe", *shape, "-O", "tp=4", "-O", "dp=2")
    for all_words in ((*overriding, "--config", str(file)), ("--config", str(file), *overriding)):
        assert run_command(capsys, "print", "gpipe", *shape, *all_words) == plain
    file.write_text("[memory]\nmemory_limit = 'much'\n")
    error = run_refused_command(
        capsys, "check", "gpipe", "--sizes=saved=1GB", "--config", str(file)
    )
    assert "line 2, column 1: memory.memory_limit must be" in error and "'much'" in error
    file.write_text("[memory]\nmemory_limit = '1GB'\n")
    limited = run_refused_command(
        capsys, "check", "gpipe", "--sizes=saved=1GB", "--config", str(file)
    )
    assert "MemoryLimitError" in limited
    for text, hint in (
        ("[pipeline]\nzreo = 3\n", "did you mean zero?"),
        ("[pipelin]\nzero = 3\n", "did you mean pipeline?"),
        ("zero = 3\n", "it belongs into a section: [pipeline]"),
        ("[pipeline]\nclip_grad_norm = 1.0\n", "did you mean train.clip_grad_norm?"),
        ("[train]\nranks = 4\n", "did you mean pipeline.ranks?"),
        ("[pipeline]\nzero = '3'\n", "must be an integer, not '3'"),
        ("[pipeline]\nzero = true\n", "must be an integer, not true"),
        ("[pipeline]\noverlap = 'yes'\n", "must be yes or no, not 'yes'"),
    ):
        file.write_text(text)
        assert hint in run_refused_command(capsys, "check", "gpipe", "--config", str(file))
    assert "--config is given twice" in run_refused_command(
        capsys, "check", "gpipe", "--config", "examples/demo.toml", "--config", str(file)
    )
    file.write_text("[pipeline]\ntp = 0\n")
    with pytest.raises(UsageError, match=r"pipeline\.tp must be an integer from 1"):
        read_config(str(file))


@pytest.mark.parametrize(
    ("lines", "parts"),
    [
        ("\n[pipeline]\nzero = 5", ["run.toml, line 3, column 1: pipeline.zero must be"]),
        ("[pipelin]\nzero = 3", ["run.toml, line 1, column 2: no section 'pipelin'"]),
        ("[pipeline]\ntp = 1\nzreo = 3", ["run.toml, line 3, column 1: no setting pipeline.zreo"]),
        ("[pipeline.memory]\nrecompute = 'all'", ["[memory] is a section of its own"]),
        ("[memory]\nmemory_limit = '4 Gb'", ["line 2, column 1", 'memory_limit = "40GB"']),
        ("[pipeline]\nzero = 1\nzero = 2", ["line 3, column 1: zero is set twice"]),
        # compile raises these errors, long after the file was read.
        ("[pipeline]\nranks = 2\nplacement = [0, 2]", ["stage 1 on rank 2", "run.toml, line 3"]),
        ("[memory]\n\nrecompute = '0.99'", ["microbatch 99", "run.toml, line 3: memory.recompute"]),
    ],
)
def test_config_errors_have_line(
    lines: str, parts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(lines)
    message = run_refused_command(capsys, "check", "gpipe", "--config", str(file))
    assert all(fact in message for fact in parts), message


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"memory_limit": 9e9}, "sizes=Sizes(activation=16e6, saved=1.2e9)"),
        ({"recompute": "fit", "sizes": schedir.Sizes(saved=1e9)}, "memory_limit=40e9"),
        ({"fill_collective_waits": "W"}, "costs=Costs(F=1, B=2, tp_reduce=0.5)"),
        ({"sizes": schedir.Sizes(saved=1e9), "memory_limit": 5e9},
         'offload="fit" moves them to the host'),
    ],
)  # fmt: skip
def test_python_hints_have_no_command_line_options(options: dict[str, Any], hint: str) -> None:
    with pytest.raises(SchedirError) as caught:
        schedir.compile("gpipe", ranks=4, microbatches=8, **options)
    assert hint in caught.value.hint
    assert "--" not in caught.value.hint and "-O" not in caught.value.hint
    shown_hint: Any = caught.value.hint
    pickled = pickle.loads(pickle.dumps(shown_hint))
    assert (pickled, pickled.command) == (shown_hint, shown_hint.command)


def test_error_of_overriding_option_has_no_config_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[memory]\nrecompute = '0.99'\n")
    command = ("check", "gpipe", "--config", str(file), "-O", "recompute=0.98")
    message = run_refused_command(capsys, *command)
    assert "microbatch 98" in message and "run.toml" not in message


def test_no_command_prints_first_steps(capsys: pytest.CaptureFixture[str]) -> None:
    text = run_command(capsys)
    assert text.count("\n  schedir ") == 7 and "schedir --help" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_help_examples_are_valid_commands(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The options in the examples exist, and so does the page that the help names."""
    monkeypatch.chdir(ROOT)
    if command == "checkpoint":  # its commands have their own help
        return
    examples = import_command(command).EXAMPLES
    assert examples in run_command(capsys, command, "--help")
    lines = [line.split("   ")[0] for line in examples.splitlines() if line.startswith("  ")]
    assert lines
    for line in lines:
        words = shlex.split(line)
        assert words[0] == "schedir"
        _build_parser(words[1:]).parse_args(words[1:])
    page = examples.rpartition("The page ")[2].split()[0]
    assert (ROOT / page).is_file()


def test_import_command_finds_module() -> None:
    assert import_module("schedir.commands.import_") is import_command("import")


@pytest.mark.parametrize("module", sorted({*RENAMED_ATTRIBUTES} - {"schedir.runtime"}))
def test_renamed_attribute_names_new_one(module: str) -> None:
    loaded_module = import_module(module)
    for old, new in RENAMED_ATTRIBUTES[module].items():
        assert old not in loaded_module.__all__
        assert new in {
            *dir(loaded_module),
            *loaded_module.__all__,
        }
        for code in (f"import {module}; {module}.{old}", f"from {module} import {old}"):
            with pytest.raises(ImportError, match=f"has no attribute '{old}': it is now {new}$"):
                exec(code, {})


def test_search_help_omits_program_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert "-O" not in run_command(capsys, "search", "--help")
    assert "-O" in run_command(capsys, "simulate", "--help")


def test_compile_accepts_recompute_names_of_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """`schedir plan` prints none and full, which `compile` must accept."""
    plain, full = (
        run_command(capsys, "print", "gpipe", *option) for option in ((), ("-O", "recompute=all"))
    )
    assert plain == run_command(capsys, "print", "gpipe", "-O", "recompute=none") != full
    assert full == run_command(capsys, "print", "gpipe", "-O", "recompute=full")
    assert plain == run_command(capsys, "print", "gpipe", "-O", "offload=none")
    program = schedir.compile("gpipe", ranks=4, microbatches=8)
    default_options: tuple[dict[str, Any], ...] = ({"recompute": "none"}, {"offload": "none"})
    for options in default_options:
        with_default = schedir.compile("gpipe", ranks=4, microbatches=8, **options)
        assert with_default.digest == program.digest


def test_costs_are_read_from_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "costs.txt"
    expected = run_command(capsys, "simulate", "gpipe", "--costs", "F=1:2:1:1,B=2,send=0.5")
    for text in (
        "F=1:2:1:1,\nB=2, send=0.5\n",
        "F=1:2:1:1\nB=2\n\nsend=0.5",
        "F=1:2:\n1:1,B=2,send=0.5",
    ):
        file.write_text(text)
        assert run_command(capsys, "simulate", "gpipe", "--costs", f"@{file}") == expected


def test_wrong_file_suffix_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program, run = tmp_path / "a.sched", tmp_path / "b.timeline"
    run_command(capsys, "compile", "gpipe", "-o", str(program))
    run_command(capsys, "simulate", "gpipe", "-o", str(run))
    with pytest.raises(TraceError, match=r"hint: schedir\.from_text"):
        schedir.load_timeline(program)
    wrong_run, wrong_program = (
        program.rename(tmp_path / "a.timeline"),
        run.rename(tmp_path / "b.sched"),
    )
    assert f"rename the file to {tmp_path}/a.sched" in run_refused_command(
        capsys, "check", str(wrong_run)
    )
    assert f"rename the file to {tmp_path}/b.timeline" in run_refused_command(
        capsys, "check", str(wrong_program)
    )


def test_imported_names_are_not_listed_as_schedules(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from schedir import B, F, concat, weave\n\n\n"
        "def mine(rank, ranks, microbatches):\n    return microbatches * (F + B)\n"
    )
    error = run_refused_command(capsys, "check", f"{file}:nothing")
    assert "hint: the schedules are mine\n" in error + "\n"
