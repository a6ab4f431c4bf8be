"""The museum: real failures of pipelines, a file each, and what must be said of them.

A case is `NAME.toml` here:

    chapter = "wait"                one of CHAPTERS, by which the page is ordered
    order = 1                       its place there
    title = "..."
    sources = ["owner/repo#1"]      the public threads that it is known from
    here = "tests/..."              or the test of ours in which it is seen, where none is known
    seen = "..."                    what was seen in the field, as these threads tell it
    follows = "..."                 what follows from a model, or from counting
    unconfirmed = "..."             what is not confirmed on real NCCL; may be left out
    missing = "..."                 instead of a program: why none can say it, and what would
    program = '''...'''             the text of a program
    make = "..."                    or an expression of schedir that makes one, or refuses to
    runs = [["a", "b"], ["a"]]      or for each rank the steps that it runs in turn, with
    steps.a = '''...'''            the text of each
    show = "per_pair"                   the model whose verdict the page shows; else `per_device`,
    or
                                    the first under which the case is refused
    activation = 16e6               the size of a message, if it runs where such wait for nobody
    mended = '''...'''             the program that should be there instead, right under every model

    [refused]                       by model, what must be said; what is not named must finish
    per_device = ["DeadlockError", "rank 0 #3 send_act 0.1", ...]
    every = [...]                   the same under all models
    [lazy]                          the same where communicators are made at their first use, by
    per_pair = [...]                    model, of those under which the case is not refused anyway

What must be said is the class of the error and the instructions that it names; where it names none,
the sentence of its first line.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import schedir
from schedir import Program, Sizes, check, check_program_sequence, from_text
from schedir.analysis.progress_models import MODELS, ProgressModel
from schedir.errors import DeadlockError, SchedirError

HERE = Path(__file__).parent
PUBLIC = {name: getattr(schedir, name) for name in schedir.__all__}
NAMES = {**PUBLIC, **vars(schedir.schedules)}
CHAPTERS = {
    "wait": "Ranks that wait for each other",
    "meet": "Messages that match wrongly",
    "work": "Missing or misplaced work",
    "steps": "Sequences of steps",
    "sums": "Wrong or missing reductions",
    "room": "Limits of memory and groups",
    "unsaid": "Failures outside of a program",
}


@dataclass(frozen=True)
class Case:
    """One failure; what its fields are, the docstring of this module says."""

    name: str
    chapter: str
    order: int
    title: str
    sources: list[str]
    seen: str
    here: str = ""
    follows: str = ""
    unconfirmed: str = ""
    missing: str = ""
    program: str = ""
    make: str = ""
    mended: str = ""
    steps: dict[str, str] = field(default_factory=dict)
    runs: list[list[str]] = field(default_factory=list)
    show: Literal["", ProgressModel] = ""
    activation: float = 0.0
    refused: dict[str, list[str]] = field(default_factory=dict)
    lazy: dict[str, list[str]] = field(default_factory=dict)

    @property
    def is_said(self) -> bool:
        """Whether there is a program, or a sequence of such."""
        return bool(self.program or self.make or self.runs)

    def ran(self) -> list[list[Program]]:
        """The programs that each rank runs one after the other, of a case of steps."""
        steps = {name: from_text(text) for name, text in self.steps.items()}
        return [[steps[name] for name in row] for row in self.runs]

    def made(self) -> Program:
        """The program, anew each time: no proof is left over.  What makes it may refuse."""
        made = from_text(self.program) if self.program else eval(self.make.strip(), dict(NAMES))
        assert isinstance(made, Program)
        return made

    def refusal(self, progress_model: ProgressModel, **how: Any) -> SchedirError | None:
        """What `check` says under a model, None if it accepts."""
        if self.activation:
            how["sizes"] = Sizes(activation=self.activation)
        try:
            check_program_sequence(self.ran(), progress_model) if self.runs else check(
                self.made(), progress_model, **how
            )
        except SchedirError as error:
            return error
        return None

    def expected(self, progress_model: ProgressModel) -> list[str]:
        """What must be said under a model; empty if the program must be accepted."""
        return self.refused.get("every", self.refused.get(progress_model, []))


def verdict(error: SchedirError | None) -> list[str]:
    """What an error says, as a case says it."""
    if error is None:
        return []
    named = error.cycle if isinstance(error, DeadlockError) else error.sites
    where = [f"rank {one.rank} #{one.index} {one.instr}" for one in named]
    return [type(error).__name__, *(where or [error.fact])]


def cases() -> list[Case]:
    """All of them, as the page has them."""
    found = []
    for path in HERE.glob("*.toml"):
        told = tomllib.loads(path.read_text())
        known = {f.name for f in fields(Case)}
        assert {*told} <= known, f"{path.name}: {sorted({*told} - known)}"
        named = {*told.get("refused", {}), *told.get("lazy", {})}
        assert named <= {"every", *MODELS}, path.name
        found.append(Case(path.stem, **told))
    chapters = [*CHAPTERS]
    return sorted(found, key=lambda case: (chapters.index(case.chapter), case.order))
