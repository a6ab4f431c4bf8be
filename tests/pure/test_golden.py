"""Tests of golden files, each of which contains its expected output. A new file is a new test.

`golden/*.sched`: a program, and in its first line (a comment) the call that compiles it.
`golden/digests.txt`: the digests of these programs, which only a new format may change.
`golden/refused/*.txt`: a wrong program, a line of dashes, and the class and message of its error.
`golden/mistakes.txt`: schedules with typical mistakes of beginners, and the message of each.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest

import schedir
from schedir.__main__ import main
from schedir.analysis.progress_models import MODELS
from schedir.errors import SchedirError
from schedir.ir.text_format import from_text, to_text
from schedir.verify.check import check

GOLDEN = Path(__file__).parents[1] / "golden"
PUBLIC = {name: getattr(schedir, name) for name in schedir.__all__}
NAMES = {**PUBLIC, **vars(schedir.schedules), "partial": partial}


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.sched")), ids=lambda p: p.stem)
def test_golden_program_compiles_to_its_text(path: Path) -> None:
    text = path.read_text()
    call, body = text.split("\n", 1)
    program = eval(call.removeprefix("# "), dict(NAMES))
    assert to_text(program) == body
    assert from_text(text) == program
    for model in MODELS:
        check(from_text(text), model)


def test_golden_program_digests() -> None:
    programs = {path.stem: from_text(path.read_text()) for path in sorted(GOLDEN.glob("*.sched"))}
    text = "".join(f"{program.digest} {name}\n" for name, program in programs.items())
    assert text == (GOLDEN / "digests.txt").read_text()


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("refused/*.txt")), ids=lambda p: p.stem)
def test_golden_invalid_program_is_refused_with_message(path: Path) -> None:
    """All progress models give the same error, except where messages wait for each other."""
    text, message = re.split(r"^-+\n", path.read_text(), maxsplit=1, flags=re.M)
    depends_on_model = path.stem in ("crossed_in_a_group", "deadlock", "swapped_receives")
    for model in ("per_device",) if depends_on_model else MODELS:
        with pytest.raises(SchedirError) as caught:
            check(from_text(text), model)
        assert f"{type(caught.value).__name__}: {caught.value}\n" == message
    for site in getattr(caught.value, "sites", ()):
        assert from_text(text).streams[site.rank][site.index] == site.instr


MISTAKES = re.split(r"^={10,}\n", (GOLDEN / "mistakes.txt").read_text(), flags=re.M)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m.split("(")[0].split()[-1])
def test_golden_mistake_is_reported_with_message(
    mistake: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, message = re.split(r"^-+\n", mistake, maxsplit=1, flags=re.M)
    name = re.findall(r"def (\w+)", code)[0]
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        "from schedir import EMPTY, B, F, I, R, W, overlapped_pair, weave\n" + code
    )
    shape = ["--ranks", "2", "--microbatches", "4"]
    assert main(["check", f"mine.py:{name}", *shape]) == 2
    assert capsys.readouterr().err.replace(f"{tmp_path}/", "") == message
