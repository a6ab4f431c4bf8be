"""Tests that an extension changes as many files as CONTRIBUTING.md documents.

A test adds the extensions to a copy of the source tree, and runs them in one process.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import schedir
from schedir import commands
from tests import new_rows
from tests.cases import cases

ROOT = Path(__file__).resolve().parents[2]


# The first lines of the process that runs the extensions.
HELPERS = """
import contextlib, io, re, sys
from dataclasses import replace
from pathlib import Path
import schedir
from schedir.__main__ import main
from schedir.errors import SchedirError
from schedir.training.config.config_file import read_config
from schedir.training.config.settings_table import list_settings
from schedir.training.train import build_program

def run_command(line, code=0):
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        assert main(line.split()) == code, output.getvalue()
    return output.getvalue()

def get_error(function, *arguments, **options):
    try:
        function(*arguments, **options)
    except SchedirError as error:
        return error
    raise AssertionError
"""


class Extension(NamedTuple):
    """An extension: text to insert after a line of a file ("" for a new file), and code to run."""

    edits: list[tuple[str, str, str]]
    use: str


EXTENSIONS = {
    "a field of programs": Extension(
        [("ir/program.py",
          "    clip_grad_norm: bool = field(default=False, "
          "metadata=program_attributes.CLIP_GRAD_NORM)\n",
          """\
    echo: int = field(default=0, metadata=program_attributes.make_field_metadata(
        program_attributes.make_integer_type(0, 3), "an option of the test (0)"
    ))
""")],
        """
plain = schedir.compile("one_f_one_b", ranks=2, microbatches=4)
assert plain.digest == sys.argv[1] and "echo" not in schedir.to_text(plain)
program = schedir.compile("one_f_one_b", ranks=2, microbatches=4, echo=2)
text = schedir.to_text(program)
assert "clip_grad_norm no\\necho 2\\n" in text
assert schedir.from_text(text) == program and program.digest != plain.digest
error = get_error(schedir.from_text, text.replace("echo 2", "echo 4"))
assert (error.line, error.column) == (5, 6) and "from 0 to 3" in error.fact
assert get_error(replace, plain, echo=-1).fields == ("echo",)

(setting,) = [each for each in list_settings()["pipeline"][1] if each.name == "echo"]
assert setting.meaning == "an option of the test (0)"
Path("x.sched").write_text(text)
Path("run.toml").write_text("[pipeline]\\nranks = 2\\necho = 1\\n")
assert read_config("run.toml").request.program.echo == 1
error = str(get_error(read_config, "run.toml", ["pipeline.echo=4"]))
assert "pipeline.echo must be an integer of at least 0 and below 4" in error
error = str(get_error(read_config, "run.toml", ["pipeline.schedule=x.sched"]))
assert "line 3, column 1: x.sched has echo 2, not 1" in error

assert "-O echo=N" in run_command("options")
assert "\\necho 2\\n" in run_command("print gpipe -O echo=2")
run_command("print x.sched -O echo=2")
error = run_command("print x.sched -O echo=1", code=2)
assert "has echo 2, not 1\\n  hint: leave out -O echo" in error
assert "-O echo: must be an integer from 0 to 3" in run_command("print gpipe -O echo=4", code=2)
""",
    ),
    "a pass": Extension(
        [("passes/mark.py", "", """\
from dataclasses import replace

from schedir.ir.pipeline.field_schema import make_integer_type
from schedir.passes.pass_types import Pass


def mark(program, options):
    return replace(program, name=f"{program.name}{options.extra_options['mark_by']}")


PASSES = (
    Pass("mark", "draft", mark,
         should_run=lambda program, options: "mark_by" in options.extra_options,
         option_names=("mark_by", "doubtful"), option_types={"mark_by": make_integer_type(0, 9)},
         description="a number after the name"),
)
""")],
        """
options = run_command("options")
assert all(text in options for text in ("-O mark_by=N", "a number after", "-O doubtful "))
assert "program gpipe0\\n" in run_command("print gpipe -O mark_by=0")
assert "program gpipe\\n" in run_command("print gpipe -O doubtful")
assert "from 0 to 9" in run_command("print gpipe -O mark_by=10", code=2)
run_command("print gpipe -O mark_by=1 -o marked.sched")
error = run_command("print marked.sched -O mark_by=0", code=2)
assert "-O mark_by applies only to schedules" in error

def get_name(*settings):
    config = read_config("empty.toml", [f"pipeline.{setting}" for setting in settings])
    return build_program(config).name

Path("empty.toml").touch()
assert get_name() == "one_f_one_b"
assert get_name("mark_by=0", "doubtful=true") == "one_f_one_b0"
assert "below 10" in str(get_error(get_name, "mark_by=10"))
error = str(get_error(get_name, "schedule=marked.sched", "mark_by=0"))
assert "mark_by applies only to schedules and drafts" in error
""",
    ),
    "a progress model": Extension(
        [("analysis/progress_models.py", '    "per_edge", "per_pair", ', '"way", '),
         ("analysis/progress_models.py",
          '        "per_pair", True, True, False, False, False,\n'
          '        "one queue per pair of ranks, for both directions",\n'
          "        \"torch's lazily created point-to-point communicators, for transfers that are "
          "issued alone\",\n"
          "    ),\n",
          '    ModelRow("way", True, False, True, True, False, "queue per way", "nobody"),\n')],
        """
program = schedir.compile(schedir.schedules.interleaved, schedir.PipelineShape(4, 8, 2),
                          progress_model="way")
spans = [schedir.simulate(program, schedir.Costs(send=0.5), progress_model=model).span
         for model in ("per_edge", "way", "per_device")]
assert spans == sorted(spans) and spans[0] < spans[2]
run_command("check gpipe --progress-model way")
""",
    ),
    "a schedule": Extension(
        [("schedules/single_stage.py", "    warmup = min(2 * (P - 1 - r), m)\n"
          "    return warmup * F + (m - warmup) * (F + B) + warmup * B\n", """\


def in_pairs(r: int, P: int, m: int) -> Word:
    return m // 2 * (2 * F) + m // 2 * (2 * B)
"""),
         ("schedules/__init__.py", "from schedir.schedules.single_stage import eager_1f1b, "
          "forward_only, gpipe", ", in_pairs"),
         ("schedules/__init__.py", '    "gpipe",\n', '    "in_pairs",\n')],
        """
run_command("check in_pairs --microbatches 4")
""",
    ),
    "a transport": Extension(
        [("transports/slow.py", "", """\
from time import sleep

from schedir.transports.gloo import GlooTransport


class Slow(GlooTransport):
    def send(self, tensor, peer, lane):
        sleep(0.001)
        return super().send(tensor, peer, lane)
"""),
         ("transports/registry.py", '        "by Gloo, on one machine or several",\n    ),\n',
          '    TransportRow("slow", "cpu", "per_edge", True, "slow:Slow", "slowly"),\n')],
        """
from schedir.transports.registry import choose_transport
open("x.toml", "w").write("[train]\\ntransport = 'slow'\\n")
assert read_config("x.toml").train.transport == "slow"
program = schedir.compile(schedir.schedules.gpipe, schedir.PipelineShape(1, 1))
assert choose_transport("slow", "cpu", program).__name__ == "Slow"
""",
    ),
    "a command": Extension(
        [("commands/__init__.py", "COMMANDS: Final = {\n",
          '    "count": "say how many instructions a program has",\n'),
         ("commands/count.py", "", '''\
"""Count the instructions of a program."""

import argparse

from schedir.commands.common.schedule_options import add_compile_options, add_source, make_request

def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source(parser)
    add_compile_options(parser)


def run(args: argparse.Namespace) -> str:
    return f"{len(make_request(args, args.source).program)}\\n"
''')],
        """
commands = run_command("--help")
assert "count" in re.findall(r"^    (\\w+)(?:\\s|$)", commands, re.M)
assert "say how many instructions a program has" in commands
assert "--microbatches" in run_command("count --help")
program = schedir.compile("gpipe", ranks=4, microbatches=8)
assert run_command("count gpipe") == f"{len(program)}\\n"
""",
    ),
    "a kind of collective": Extension(
        [("transports/collectives.py", 'CollectiveName = Literal[\"all_reduce\", ', '"most", '),
         ("transports/collectives.py",
             "COLLECTIVES: Final[dict[CollectiveName, CollectiveKind]] = {\n", """\
    "most": CollectiveKind(
        lambda own: [torch.stack([*own]).amax(0)] * len(own),
        lambda group, out, own: dist.all_reduce(
            out.copy_(own), op=dist.ReduceOp.MAX, group=group, async_op=True
        ),
    ),
""")],
        """
import torch
from schedir.transports.in_process.mailbox import make_mailboxes
program = schedir.compile(schedir.schedules.gpipe, schedir.PipelineShape(3, 3))
outs = [torch.zeros(1) for _ in range(3)]
for rank, mail in enumerate(make_mailboxes(program, "per_edge", False, [])):
    mail.start_collective("most", "model", outs[rank], torch.tensor([float(rank)]))
assert [float(out) for out in outs] == [2.0, 2.0, 2.0]
""",
    ),
}  # fmt: skip


INSTRUCTION = "an instruction"
USE_OF_INSTRUCTION = """
program = schedir.compile(schedir.schedules.one_f_one_b, schedir.PipelineShape(2, 4), stash=True)
assert "stash 0.0" in schedir.to_text(program, folded=False)
"""


def _apply_extension(tree: Path, name: str) -> int:
    """Add an extension to a copy of the tree, and return the number of files that it changes."""
    edits = EXTENSIONS[name].edits
    for file, line, new in edits:
        path = tree / "schedir" / file
        text = path.read_text() if line else ""
        assert not line or text.count(line) == 1, (file, line)
        path.write_text(text.replace(line, line + new) if line else new)
    return len({file for file, _, _ in edits})


def _list_changed_files(tree: Path) -> list[str]:
    """Return the files of schedir that are new or changed."""

    def files(root: Path) -> dict[str, bytes]:
        paths = (f for f in (root / "schedir").rglob("*.py") if "__pycache__" not in f.parts)
        return {str(f.relative_to(root)): f.read_bytes() for f in paths}

    old, new = files(ROOT), files(tree)
    return sorted(name for name in new if new[name] != old.get(name))


@pytest.mark.parametrize(
    "names",
    cases([(INSTRUCTION, *EXTENSIONS)], [(name,) for name in (INSTRUCTION, *EXTENSIONS)]),
    ids=lambda names: "all" if len(names) > 1 else names[0],
)
def test_extensions_change_documented_number_of_files(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    num_files, code = dict[str, int](), HELPERS
    new_rows.copy_tree(tmp_path, *(["stash"] if INSTRUCTION in names else []))
    for name in names:
        if name == INSTRUCTION:
            num_files[name] = len(_list_changed_files(tmp_path))
            code += USE_OF_INSTRUCTION
        else:
            num_files[name] = _apply_extension(tmp_path, name)
            code += EXTENSIONS[name].use
    env = {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1", "NUMBA_DISABLE_JIT": "1"}
    plain = schedir.compile("one_f_one_b", ranks=2, microbatches=4)
    command = [sys.executable, "-c", code, plain.digest]
    completed = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr
    rows = re.findall(r"^\| (an? [^|]+) \| (\d) \|", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    documented = {kind.strip(): int(files) for kind, files in rows}
    assert documented.keys() == {INSTRUCTION, *EXTENSIONS}
    for name in names:  # an instruction also needs its number
        assert documented[name] == num_files[name] <= 3 + (name == INSTRUCTION)


def test_command_files_have_rows() -> None:
    folder = Path(commands.__file__).parent
    files = {file.stem for file in folder.glob("[a-z]*.py")}
    files |= {file.parent.name for file in folder.glob("*/__init__.py")} - {"common"}
    assert files == {
        commands.import_command(name).__name__.split(".")[-1] for name in commands.COMMANDS
    }
