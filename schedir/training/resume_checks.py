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
from schedir.retired_names import RENAMED_SETTINGS, get_current_value
from schedir.training.config.model_kinds import get_model_kind
from schedir.training.config.run_config import Config

RUN_FILE: Final = "run.json"
DATA_FACT: Final = "the data"  # beside the settings, of a Corpus: how much, and its digest
# What a run does not go on with when it has changed, and of other sections what it does not tell.
_FIXED_SETTINGS: Final = ("model.", "data.", DATA_FACT, "train.precision")
_TOKENIZER_SETTING: Final = "data.tokenizer"  # or a name
_CHANGEABLE_SETTINGS: Final = ("data.source", "data.validation", "data.microbatch_size")
_UNREPORTED_SETTINGS: Final = ("output.", "data.source", "data.validation", "train.checkpoint_dir",
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
    def from_config(config: Config, data: Mapping[str, str]) -> RunIdentity:
        """The run that a configuration goes on with, or a new one; `data` are the facts of its
        Corpus.

        Raises UsageError for data that are not those of the run.
        """
        settings = config.setting_texts | dict(data)
        before = find_resumed_run(config)
        if before is None:
            return RunIdentity(token_hex(8), settings)
        _require_same_settings(config, before, settings)
        return RunIdentity(before.name or token_hex(8), settings, before.step)

    @property
    def extra_state(self) -> dict[str, Any]:
        """What each of its checkpoints says of it."""
        return {"run": self.name, "settings": dict(self.settings)}

    def describe_changes(self, extra_state: Mapping[str, Any]) -> str:
        """What is told to be another than a checkpoint says: "" where nothing is."""
        had = _parse_settings(extra_state)
        said = [
            f"{name} {had[name]} to {value}"
            for name, value in self.settings.items()
            if had.get(name, value) != value and not name.startswith(_UNREPORTED_SETTINGS)
        ]
        return ", ".join(said)

    def write(self, directory: str | Path) -> None:
        """Say in a folder whose it is."""
        with atomic_write(Path(directory, RUN_FILE)) as temporary, temporary.open("w") as file:
            json.dump(self.extra_state, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())

    def owns_directory(self, directory: str | Path) -> bool:
        """Whether a folder says that it is this run's."""
        return bool(self.name) and read_run_name(directory) == self.name


def read_run_name(directory: str | Path) -> str:
    """The name of the run whose a folder is, "" where it says none."""
    return str(_read_run_file(Path(directory, RUN_FILE)).get("run", ""))


def find_resumed_run(config: Config) -> RunIdentity | None:
    """The run whose the folder of checkpoints is, if the configuration goes on with it."""
    folder = config.train.checkpoint_dir
    if folder is None or config.train.resume == "no":
        return None
    for step in reversed(CheckpointDirectory(folder).list_steps()):
        try:
            state = CheckpointDirectory(folder).load_manifest(step).state["extra"]
        except (SchedirError, OSError, ValueError, LookupError, TypeError):
            continue  # it is not whole: whoever loads one says so
        return RunIdentity(str(state.get("run", "")), _parse_settings(state), step)
    state = _read_run_file(Path(folder, RUN_FILE))
    return RunIdentity(str(state["run"]), _parse_settings(state)) if "run" in state else None


def require_resumable(config: Config) -> None:
    """Refuse a folder of checkpoints that is not as `train.resume` wants it, or another model's.

    Raises UsageError.
    """
    folder, resume = config.train.checkpoint_dir, config.train.resume
    if folder is None:
        return
    steps = CheckpointDirectory(folder).list_steps()
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
    before = find_resumed_run(config)
    if before is not None:
        _require_same_settings(config, before, config.setting_texts)


def _require_same_settings(
    config: Config, previous_run: RunIdentity, settings: Mapping[str, str]
) -> None:
    # A setting that an older version did not have was what it is unless it is said.
    unsaid = Config(model=type(config.model)()).setting_texts | {
        "model.kind": get_model_kind(GPTConfig())
    }
    for name, value in settings.items():
        had = previous_run.settings.get(name, unsaid.get(name, value))
        if had == value or name in _CHANGEABLE_SETTINGS or not name.startswith(_FIXED_SETTINGS):
            continue
        data = previous_run.settings.get(DATA_FACT)
        if (
            name == _TOKENIZER_SETTING
            and "bytes" not in {had, value}
            and data == settings.get(DATA_FACT, data)
        ):
            continue  # a file that has moved: it gives the same tokens
        what = f"the checkpoint of step {previous_run.step}" if previous_run.step else "the run"
        raise UsageError(
            f"{what} in {config.train.checkpoint_dir} has {name} {had}, and not {value}",
            hint="--set train.checkpoint_dir=... writes elsewhere",
            fields=[name.rpartition(".")[2], "checkpoint_dir"]
            if name != DATA_FACT
            else ["checkpoint_dir"],
        )


def _parse_settings(state: Mapping[str, Any]) -> dict[str, str]:
    said = state.get("settings")
    settings = {}
    for name, value in said.items() if isinstance(said, dict) else ():
        current = RENAMED_SETTINGS.get(
            str(name), str(name)
        )  # a checkpoint may be older than the names
        settings[current] = get_current_value(current.rpartition(".")[2], str(value))
    return settings


def _read_run_file(path: Path) -> dict[str, Any]:
    """What a `run.json` says; nothing of one that is none."""
    try:
        said = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}
