"""Check which checkpoints a run may resume from.  Needs no torch.

A run has a name of its own, drawn when it begins.  A file `run.json` says it, and all settings, in
the folder of checkpoints, and in that of results beside them; so does the state of each checkpoint.
What is found under the name of a run is that run's, and it may go on there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Any, Final

from schedir.checkpoints.checkpoint_directory import CheckpointDirectory
from schedir.errors import SchedirError, UsageError
from schedir.io.files import atomic_write
from schedir.models.gpt_config import GPTConfig
from schedir.retired_names import SETTINGS, current_value
from schedir.training.config.model_kinds import kind_of
from schedir.training.config.run_config import Config

RUN: Final = "run.json"
DATA: Final = "the data"  # beside the settings, of a Corpus: how much, and its digest
# What a run does not go on with when it has changed, and of other sections what it does not tell.
_OF_THE_RUN: Final = ("model.", "data.", DATA, "train.precision")
_PATH: Final = "data.tokenizer"  # or a name
_FREE: Final = ("data.source", "data.validation", "data.microbatch_size")
_UNTOLD: Final = ("output.", "data.source", "data.validation", "train.checkpoint_dir",
                  "train.checkpoint_every",
                  "train.checkpoint_keep", "train.resume", "train.shutdown_grace",
                  "train.log_every",
                  "train.timeout", "train.threads", "train.on_nonfinite")  # fmt: skip


@dataclass(frozen=True)
class RunIdentity:
    """A run: its name, "" where nobody has given one, its settings in words, and the step of its
    newest checkpoint, 0 where there is none."""

    name: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    step: int = 0

    @staticmethod
    def of(config: Config, data: Mapping[str, str]) -> RunIdentity:
        """The run that a configuration goes on with, or a new one; `data` are the facts of its
        Corpus.

        Raises UsageError for data that are not those of the run.
        """
        settings = config.told | dict(data)
        before = origin(config)
        if before is None:
            return RunIdentity(token_hex(8), settings)
        _expect_same(config, before, settings)
        return RunIdentity(before.name or token_hex(8), settings, before.step)

    @property
    def extra(self) -> dict[str, Any]:
        """What each of its checkpoints says of it."""
        return {"run": self.name, "settings": dict(self.settings)}

    def changed(self, extra: Mapping[str, Any]) -> str:
        """What is told to be another than a checkpoint says: "" where nothing is."""
        had = _settings(extra)
        said = [
            f"{name} {had[name]} to {value}"
            for name, value in self.settings.items()
            if had.get(name, value) != value and not name.startswith(_UNTOLD)
        ]
        return ", ".join(said)

    def write(self, folder: str | Path) -> None:
        """Say in a folder whose it is."""
        with atomic_write(Path(folder, RUN)) as temporary, temporary.open("w") as file:
            json.dump(self.extra, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())

    def has(self, folder: str | Path) -> bool:
        """Whether a folder says that it is this run's."""
        return bool(self.name) and named(folder) == self.name


def named(folder: str | Path) -> str:
    """The name of the run whose a folder is, "" where it says none."""
    return str(_read(Path(folder, RUN)).get("run", ""))


def origin(config: Config) -> RunIdentity | None:
    """The run whose the folder of checkpoints is, if the configuration goes on with it."""
    folder = config.train.checkpoint_dir
    if folder is None or config.train.resume == "no":
        return None
    for step in reversed(CheckpointDirectory(folder).steps()):
        try:
            state = CheckpointDirectory(folder).read(step).state["extra"]
        except (SchedirError, OSError, ValueError, LookupError, TypeError):
            continue  # it is not whole: whoever loads one says so
        return RunIdentity(str(state.get("run", "")), _settings(state), step)
    state = _read(Path(folder, RUN))
    return RunIdentity(str(state["run"]), _settings(state)) if "run" in state else None


def expect_resumable(config: Config) -> None:
    """Refuse a folder of checkpoints that is not as `train.resume` wants it, or another model's.

    Raises UsageError.
    """
    folder, resume = config.train.checkpoint_dir, config.train.resume
    if folder is None:
        return
    steps = CheckpointDirectory(folder).steps()
    if resume == "must" and not steps:
        raise UsageError(
            f"there is no checkpoint in {folder} from which to resume",
            hint="--set train.resume=auto begins at step 1 then",
            fields=["resume", "checkpoint_dir"],
        )
    if resume == "no" and steps and not config.output.overwrite:
        raise UsageError(
            f"{folder} has checkpoints of an earlier run, the newest of step {steps[-1]}",
            hint="--set train.resume=auto goes on from it, --set train.checkpoint_dir=... writes "
            "elsewhere, --set output.overwrite=true removes them at the first step",
            fields=["checkpoint_dir", "resume", "overwrite"],
        )
    before = origin(config)
    if before is not None:
        _expect_same(config, before, config.told)


def _expect_same(config: Config, before: RunIdentity, settings: Mapping[str, str]) -> None:
    # A setting that an older version did not have was what it is unless it is said.
    unsaid = Config(model=type(config.model)()).told | {"model.kind": kind_of(GPTConfig())}
    for name, value in settings.items():
        had = before.settings.get(name, unsaid.get(name, value))
        if had == value or name in _FREE or not name.startswith(_OF_THE_RUN):
            continue
        data = before.settings.get(DATA)
        if name == _PATH and "bytes" not in {had, value} and data == settings.get(DATA, data):
            continue  # a file that has moved: it gives the same tokens
        what = f"the checkpoint of step {before.step}" if before.step else "the run"
        raise UsageError(
            f"{what} in {config.train.checkpoint_dir} has {name} {had}, and not {value}",
            hint="--set train.checkpoint_dir=... writes elsewhere",
            fields=[name.rpartition(".")[2], "checkpoint_dir"]
            if name != DATA
            else ["checkpoint_dir"],
        )


def _settings(state: Mapping[str, Any]) -> dict[str, str]:
    said = state.get("settings")
    settings = {}
    for name, value in said.items() if isinstance(said, dict) else ():
        current = SETTINGS.get(str(name), str(name))  # a checkpoint may be older than the names
        settings[current] = current_value(current.rpartition(".")[2], str(value))
    return settings


def _read(path: Path) -> dict[str, Any]:
    """What a `run.json` says; nothing of one that is none."""
    try:
        said = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}
