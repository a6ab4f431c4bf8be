"""The museum: real failures of pipelines, one file each, and the errors that schedir must report.

A case is a file `NAME.toml` in this folder, and programs in files `*.sched`:

    chapter = "wait"                a chapter of the page: a key of CHAPTERS
    order = 1                       the position in the chapter
    title = "..."
    sources = ["owner/repo#1"]      the public threads about the failure
    here = "tests/..."              without a thread: the test of schedir that shows the failure
    seen = "..."                    what these threads report
    follows = "..."                 what follows from a progress model, or from counting
    unconfirmed = "..."             a statement that is not confirmed on real NCCL (optional)
    missing = "..."                 instead of a program: why no program shows the failure
    runs = [["a", "b"], ["a"]]      for each rank, the names of the programs that it runs in turn
    replicas = ["a", "b"]           for each data-parallel replica, the name of its program
    make = "..."                    an expression of schedir that makes or refuses a program,
    arguments = "..."               and the arguments of `schedir check` that do the same
    show = "per_pair"               the progress model whose error the page shows; the default is
                                    `per_device`, or the first model that refuses the case
    activation = 16e6               the size of a message: the program finishes under all models
                                    if messages of this size need no receiver

    [refused]                       the error under each model; other models must accept the program
    per_device = ["DeadlockError", "rank 0 #3 send_act 0.1", ...]
    every = [...]                   the error under all models
    [lazy]                          the error with lazy communicators, for models that accept the
    per_pair = [...]                program without them

The program of a case is `NAME.sched`, and `NAME.corrected.sched` is a corrected program, which all
models accept. A case with `runs` or `replicas` names its programs: "a" is `a.sched`.

An error is given by its class and the instructions that it names. If it names none, it is given by
the first line of its message.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import schedir
from schedir import Program, Sizes, check, check_program_sequence, check_replicas, from_text
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
    """A failure. The docstring of this module explains the fields."""

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
    arguments: str = ""
    corrected: str = ""
    runs: list[list[str]] = field(default_factory=list)
    replicas: list[str] = field(default_factory=list)
    show: Literal["", ProgressModel] = ""
    activation: float = 0.0
    refused: dict[str, list[str]] = field(default_factory=dict)
    lazy: dict[str, list[str]] = field(default_factory=dict)

    @property
    def is_said(self) -> bool:
        """Return whether the case has a program or a sequence of programs."""
        return bool(self.program or self.make or self.runs or self.replicas)

    def ran(self) -> list[list[Program]]:
        """Return the programs that each rank runs one after the other, in a case with steps."""
        return [[from_text(read_program(name)) for name in row] for row in self.runs]

    def of_replicas(self) -> list[Program]:
        """Return the program of each replica, in a case with replicas."""
        return [from_text(read_program(name)) for name in self.replicas]

    def made(self) -> Program:
        """Make the program again, without earlier proofs. This may raise the error of the case."""
        made = from_text(self.program) if self.program else eval(self.make.strip(), dict(NAMES))
        assert isinstance(made, Program)
        return made

    def refusal(self, progress_model: ProgressModel, **how: Any) -> SchedirError | None:
        """Return the error of `check` under a model, or None if it accepts the program."""
        if self.activation:
            how["sizes"] = Sizes(activation=self.activation)
        try:
            if self.runs:
                check_program_sequence(self.ran(), progress_model)
            elif self.replicas:
                check_replicas(self.of_replicas(), progress_model)
            else:
                check(self.made(), progress_model, **how)
        except SchedirError as error:
            return error
        return None

    def expected(self, progress_model: ProgressModel) -> list[str]:
        """Return the expected error under a model, or an empty list if there is none."""
        return self.refused.get("every", self.refused.get(progress_model, []))


def read_program(name: str) -> str:
    """Return the text of `NAME.sched`, or an empty string if there is no such file."""
    path = HERE / f"{name}.sched"
    return path.read_text() if path.is_file() else ""


def verdict(error: SchedirError | None) -> list[str]:
    """Return an error in the form of a case."""
    if error is None:
        return []
    named = error.cycle if isinstance(error, DeadlockError) else error.sites
    where = [
        f"replica {one.replica} " * (one.replica is not None)
        + f"rank {one.rank} #{one.index} {one.instr}"
        for one in named
    ]
    return [type(error).__name__, *(where or [error.fact])]


def cases() -> list[Case]:
    """Return all cases in the order of the page."""
    found = []
    for path in HERE.glob("*.toml"):
        told = tomllib.loads(path.read_text())
        known = {f.name for f in fields(Case)} - {"program", "corrected"}
        assert {*told} <= known, f"{path.name}: {sorted({*told} - known)}"
        named = {*told.get("refused", {}), *told.get("lazy", {})}
        assert named <= {"every", *MODELS}, path.name
        program, corrected = read_program(path.stem), read_program(f"{path.stem}.corrected")
        found.append(Case(path.stem, **told, program=program, corrected=corrected))
    chapters = [*CHAPTERS]
    return sorted(found, key=lambda case: (chapters.index(case.chapter), case.order))
