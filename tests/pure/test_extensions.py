"""Tests that an extension changes as many files as CONTRIBUTING.md documents.

A test adds the extensions to a copy of the source tree and runs them.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import new_rows
from tests.cases import cases

ROOT = Path(__file__).resolve().parents[2]


class Extension(NamedTuple):
    """An extension: text to insert after a line of a file ("" for a new file), and code to run."""

    edits: list[tuple[str, str, str]]
    use: str


EXTENSIONS = {
    "a field of programs": Extension(
        [("ir/program.py", "from schedir.ir.pipeline.field_schema import collect_fields\n",
          "from schedir.ir.pipeline.field_schema import make_field_metadata\n"
          "from schedir.ir.pipeline.field_schema import make_integer_type\n"),
         ("ir/program.py",
          "    clip_grad_norm: bool = field(default=False, "
          "metadata=program_attributes.CLIP_GRAD_NORM)\n",
          """\
    zero: int = field(default=0,
        metadata=make_field_metadata(make_integer_type(0, 3), "pieces of weights"))
""")],
        """
import schedir
program = schedir.compile(schedir.schedules.gpipe, schedir.PipelineShape(2, 2), zero=2)
text = schedir.to_text(program)
assert "zero 2" in text and schedir.from_text(text) == program
""",
    ),
    "a pass": Extension(
        [("passes/mark.py", "", """\
from dataclasses import replace

from schedir.passes.pass_types import Pass

PASSES = (
    Pass("mark", "better", lambda program, options: replace(program, name="marked"),
         should_run=lambda program, options: bool(options.extra_options.get("mark")),
         option_names=("mark",)),
)
""")],
        """
from schedir.__main__ import main
assert main(["print", "gpipe", "-O", "mark", "-o", "x.sched"]) == 0
assert "program marked" in open("x.sched").read()
""",
    ),
    "a progress model": Extension(
        [("analysis/progress_models.py", '    "per_edge", "per_pair", ', '"way", '),
         ("analysis/progress_models.py",
          '        "per_pair", True, True, False, False, False,\n'
          '        "one queue per unordered pair of ranks",\n'
          "        \"torch's lazily created point-to-point communicators, for transfers that are "
          "issued alone\",\n"
          "    ),\n",
          '    ModelRow("way", True, False, True, True, False, "queue per way", "nobody"),\n')],
        """
import schedir
from schedir.__main__ import main
program = schedir.compile(schedir.schedules.interleaved, schedir.PipelineShape(4, 8, 2),
                          progress_model="way")
spans = [schedir.simulate(program, schedir.Costs(send=0.5), progress_model=model).span
         for model in ("per_edge", "way", "per_device")]
assert spans == sorted(spans) and spans[0] < spans[2]
assert main(["check", "gpipe", "--progress-model", "way"]) == 0
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
from schedir.__main__ import main
assert main(["check", "in_pairs", "--microbatches", "4"]) == 0
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
import schedir
from schedir.training.config.config_file import read_config
from schedir.transports.registry import choose_transport
open("x.toml", "w").write("[train]\\ntransport = 'slow'\\n")
assert read_config("x.toml").train.transport == "slow"
program = schedir.compile(schedir.schedules.gpipe, schedir.PipelineShape(1, 1))
assert choose_transport("slow", "cpu", program).__name__ == "Slow"
""",
    ),
    "a command": Extension(
        [("commands/__init__.py", "COMMANDS: Final = {\n",
          '    "ranks": "tell how many ranks a schedule has",\n'),
         ("commands/ranks.py", "", '''\
"""Ranks: how many a schedule has."""

import argparse

from schedir.commands.common.schedule_options import add_compile_options, make_request

def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source")
    add_compile_options(parser)


def run(args: argparse.Namespace) -> str:
    return f"{make_request(args, args.source).shape.ranks}\\n"
''')],
        """
from schedir.__main__ import main
assert main(["ranks", "gpipe", "--ranks", "3"]) == 0
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
import schedir, torch
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
import schedir
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
    num_files, code = dict[str, int](), ""
    new_rows.copy_tree(tmp_path, *(["stash"] if INSTRUCTION in names else []))
    for name in names:
        if name == INSTRUCTION:
            num_files[name] = len(_list_changed_files(tmp_path))
            code += USE_OF_INSTRUCTION
        else:
            num_files[name] = _apply_extension(tmp_path, name)
            code += EXTENSIONS[name].use
    env = {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1", "NUMBA_DISABLE_JIT": "1"}
    command = [sys.executable, "-c", code]
    completed = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr
    rows = re.findall(r"^\| (an? [^|]+) \| (\d) \|", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    documented = {kind.strip(): int(files) for kind, files in rows}
    assert documented.keys() == {INSTRUCTION, *EXTENSIONS}
    for name in names:  # an instruction also needs its number
        assert documented[name] == num_files[name] <= 3 + (name == INSTRUCTION)
