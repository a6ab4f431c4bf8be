"""A new instruction is a row: all that reads, checks, predicts and draws programs knows it then."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

OPCODE = ("    OptimizerStep = 16\n", "    OptimizerStep = 16\n    Recompute = 17\n")
ROW = (")  # fmt: skip\n\nBY_TEXT", """\
    Row(_O.Recompute, "R", _L.COMPUTE, _MB, (_T.SAVED,), (_T.SAVED,), (), "Again.", cost="F"),
)  # fmt: skip

BY_TEXT""")  # fmt: skip

USE = """
import re, sys
import schedir
from schedir import Costs, Plan
from schedir.predict.what_if import advise
from schedir.io.perfetto import text
from schedir.schedules import one_f_one_b, zb_h1
from schedir.ir.sizes import Sizes

costs = Costs(F=2, B=3, send=0.5)
for schedule in one_f_one_b, zb_h1:
    plain = schedir.compile(schedule, Plan(2, 4), tp=2, costs=costs)
    flat = re.sub(r"(?m)^  ([BI]) (.*)$", r"  R \\2\\n  \\1 \\2", schedir.show(plain, folded=False))
    program = schedir.parse(flat)
    assert len(program) == len(plain) + 8 and program.trains and not program.is_draft
    assert schedir.parse(schedir.show(program)) == program == schedir.check(program)
    sizes = Sizes(saved=1)
    before, run = (schedir.simulate(p, costs, sizes=sizes) for p in (plain, program))
    assert run.busy.tolist() == [busy + 8 for busy in before.busy]
    assert run.peak_memory.tolist() == before.peak_memory.tolist()
    lines = ("".join(piece for piece, _ in line) for line in schedir.viz.letters(run, 200))
    assert any("R0" in line for line in lines)
    assert '"R 0.0"' in text(run) and "R 0.0" not in text(before)
    assert "Recompute" in schedir.viz.html(run)
    schedir.viz.save(schedir.viz.gantt(run, show="lanes,path,phases"), sys.argv[1])
    advise(run, costs)
    early = flat.replace("  R 0.0\\n", "", 1).replace("  F 0.0\\n", "  R 0.0\\n  F 0.0\\n", 1)
    try:
        schedir.check(schedir.parse(early))
    except schedir.errors.OrderError as error:
        assert [str(site.instr) for site in error.sites] == ["R 0.0", "F 0.0"]
    else:
        raise AssertionError("it is there before what it needs")
"""


def test_a_row_is_enough(tmp_path: Path) -> None:
    for name in ("schedir", "kernels", "viz"):
        source = ROOT / name
        shutil.copytree(source, tmp_path / name, symlinks=True,
                        ignore=shutil.ignore_patterns("__pycache__"))  # fmt: skip
    for file, changes in (("ir/ops", (OPCODE, ROW)),):
        path = tmp_path / "schedir" / f"{file}.py"
        text = path.read_text()
        for before, after in changes:
            assert text.count(before) == 1
            text = text.replace(before, after)
        path.write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", USE, str(tmp_path / "x.png")],
        cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
