"""Tests that a new program attribute is one entry, and a new command one row and one file."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import schedir
from schedir import commands
from tests.new_rows import PRODUCT, copy_folders

ROOT = Path(__file__).resolve().parents[2]

ATTRIBUTE = """\
    echo: int = field(
        default=0,
        metadata=program_attributes.make_field_metadata(
            program_attributes.make_integer_type(0, 3), "what is said twice (0)"
        ),
    )
"""
COMMAND = '''
"""Count the instructions of a program."""

import argparse

from schedir.commands.common.schedule_options import add_compile_options, add_source, make_request

def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source(parser)
    add_compile_options(parser)


def run(args: argparse.Namespace) -> str:
    return f"{len(make_request(args, args.source).program)}\\n"
'''


@pytest.fixture
def source_copy(tmp_path: Path) -> Path:
    """Copy the folders that are imported as schedir."""
    copy_folders(tmp_path, *PRODUCT)
    return tmp_path


def run_python(folder: Path, *argv: str) -> tuple[int, str]:
    """Return the exit code and all output of python with the copy in `folder`."""
    completed = subprocess.run(
        [sys.executable, *argv], cwd=folder, env={"PYTHONPATH": str(folder), "COLUMNS": "200"},
        capture_output=True, text=True,
    )  # fmt: skip
    return completed.returncode, completed.stdout + completed.stderr


RUN_COMMANDS = """
import contextlib, io, json, sys
from schedir.__main__ import main

results = []
for argv in json.loads(sys.argv[1]):
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = main(argv)
    results.append((code, output.getvalue()))
print(json.dumps(results))
"""


def run_commands(folder: Path, *commands: str) -> list[tuple[int, str]]:
    """Return the exit codes and outputs of commands of the copy, which share a process."""
    argv = json.dumps([command.split() for command in commands])
    code, output = run_python(folder, "-c", RUN_COMMANDS, argv)
    assert code == 0, output
    return [(code, text) for code, text in json.loads(output)]


ATTRIBUTE_CHECKS = """
import sys
from dataclasses import replace
import schedir
from schedir.errors import ConfigError, ParseError, ShapeError
from schedir.schedules import one_f_one_b
from schedir.training.config.settings_table import list_settings
from schedir.training.config.config_file import read_config

plain = schedir.compile(one_f_one_b, schedir.PipelineShape(2, 4))
assert plain.digest == sys.argv[1] and "echo" not in schedir.to_text(plain)
program = replace(plain, echo=2)
text = schedir.to_text(program)
assert "clip_grad_norm no\\necho 2\\n" in text
assert schedir.compile(one_f_one_b, schedir.PipelineShape(2, 4), echo=2).digest == program.digest
assert schedir.from_text(text) == program and program.digest != plain.digest
try:
    schedir.from_text(text.replace("echo 2", "echo 4"))
except ParseError as error:
    assert (error.line, error.column) == (5, 6) and "from 0 to 3" in error.fact
else:
    raise AssertionError
try:
    replace(plain, echo=-1)
except ShapeError as error:
    assert error.fields == ("echo",)
else:
    raise AssertionError

(setting,) = [each for each in list_settings()["pipeline"][1] if each.name == "echo"]
assert setting.meaning == "what is said twice (0)"
with open("run.toml", "w") as file:
    file.write("[pipeline]\\nranks = 2\\necho = 1\\n")
config = read_config("run.toml")
assert config.request.program.echo == 1
with open("x.sched", "w") as file:
    file.write(text)
for given, says in (("echo=4", "pipeline.echo must be an integer of at least 0 and below 4"),
                    ("schedule=x.sched", "line 3, column 1: x.sched has echo 2, not 1")):
    try:
        read_config("run.toml", [f"pipeline.{given}"])
    except ConfigError as error:
        assert says in str(error), error
    else:
        raise AssertionError
"""


def test_program_attribute_is_one_entry(source_copy: Path) -> None:
    path = source_copy / "schedir" / "ir" / "program.py"
    previous_field = (
        "    clip_grad_norm: bool = field(default=False, "
        "metadata=program_attributes.CLIP_GRAD_NORM)\n"
    )
    text = path.read_text()
    assert text.count(previous_field) == 1
    path.write_text(text.replace(previous_field, previous_field + ATTRIBUTE))
    plain = schedir.compile(schedir.schedules.one_f_one_b, schedir.PipelineShape(2, 4))
    code, output = run_python(source_copy, "-c", ATTRIBUTE_CHECKS, plain.digest)
    assert code == 0, output

    options, printed, same_value, other_value, too_large = run_commands(
        source_copy,
        "options",
        "print gpipe -O echo=2",
        "print x.sched -O echo=2",
        "print x.sched -O echo=1",
        "print gpipe -O echo=4",
    )
    assert "-O echo=N" in options[1]
    assert printed[0] == 0 and "\necho 2\n" in printed[1]
    assert same_value[0] == 0
    assert other_value[0] == 2 and "has echo 2, not 1\n  hint: leave out -O echo" in other_value[1]
    assert too_large[0] == 2 and "-O echo: must be an integer from 0 to 3" in too_large[1]


PASS = """
from dataclasses import replace

from schedir.ir.pipeline.field_schema import make_integer_type
from schedir.passes.pass_types import Pass

PASSES = (
    Pass(
        "mark",
        "draft",
        lambda program,
        options: replace(program, name=f"{program.name}{options.extra_options['mark_by']}"),
        should_run=lambda program, options: "mark_by" in options.extra_options,
        option_names=("mark_by", "doubtful"),
        option_types={"mark_by": make_integer_type(0, 9)},
        description="a number behind the name",
    ),
)
"""


def test_pass_options_apply_to_commands_and_settings(source_copy: Path) -> None:
    (source_copy / "schedir" / "passes" / "mark.py").write_text(PASS)
    options, marked, plain, too_large, written, refused = run_commands(
        source_copy,
        "options",
        "print gpipe -O mark_by=0",
        "print gpipe -O doubtful",
        "print gpipe -O mark_by=10",
        "print gpipe -O mark_by=1 -o x.sched",
        "print x.sched -O mark_by=0",
    )
    assert all(text in options[1] for text in ("-O mark_by=N", "a number behind", "-O doubtful "))
    assert "program gpipe0\n" in marked[1]
    assert "program gpipe\n" in plain[1]
    assert "from 0 to 9" in too_large[1]
    assert written[0] == 0
    assert refused[0] == 2 and "-O mark_by applies only to schedules" in refused[1]
    code, output = run_python(
        source_copy,
        "-c",
        """if True:
        from schedir.errors import ConfigError
        from schedir.training.config.config_file import read_config
        from schedir.training.train import build_program
        open("run.toml", "w").close()
        def names(*sets):
            return build_program(read_config("run.toml", [f"pipeline.{s}" for s in sets])).name
        assert names() == "one_f_one_b"
        assert names("mark_by=0", "doubtful=true") == "one_f_one_b0"
        for wrong in (["mark_by=10"], ["schedule=x.sched", "mark_by=0"]):
            try:
                names(*wrong)
            except ConfigError as error:
                print(error)
            else:
                raise AssertionError
    """,
    )
    assert code == 0, output
    assert "below 10" in output and "mark_by applies only to schedules and drafts" in output


def test_command_is_one_row_and_one_file(source_copy: Path) -> None:
    folder, names = source_copy / "schedir" / "commands", ["count", "import_as_well", "async"]
    rows = ""
    for file in ("count", "import_as_well", "async_"):
        (folder / f"{file}.py").write_text(COMMAND.lstrip())
        rows += f'    "{file.rstrip("_")}": "say how many instructions a program has",\n'
    table = (folder / "__init__.py").read_text()
    (folder / "__init__.py").write_text(table.replace("}\n", rows + "}\n", 1))
    commands, options, *counted = run_commands(
        source_copy, "--help", "count --help", *(f"{name} gpipe" for name in names)
    )
    listed = re.findall(r"^    (\w+)(?:\s|$)", commands[1], re.M)
    assert commands[0] == 0 and listed[-5:] == ["completion", "options", *names]
    assert "say how many instructions a program has" in commands[1]
    program = schedir.compile(schedir.schedules.gpipe, schedir.PipelineShape(4, 8))
    assert counted == 3 * [(0, f"{len(program)}\n")]
    assert "--microbatches" in options[1]


def test_command_files_have_rows() -> None:
    folder = Path(commands.__file__).parent
    files = {file.stem for file in folder.glob("[a-z]*.py")}
    files |= {file.parent.name for file in folder.glob("*/__init__.py")} - {"common"}
    assert files == {
        commands.import_command(name).__name__.split(".")[-1] for name in commands.COMMANDS
    }
