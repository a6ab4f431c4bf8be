"""Check which checkpoints a run may resume from. Needs no torch.

A run gets a random name when it begins. A run with checkpoints writes this name and all settings to
the file `run.json` in the checkpoint directory and in the output directory. Each checkpoint also
contains the name and the settings. A run may continue in a directory if the `run.json` there has
the name of the run.
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
# The settings of a run contain the size and the digest of its data under this name.
DATA_FACT: Final = "the data"
# Prefixes of settings. A run cannot resume if a setting with one of these prefixes has changed.
_FIXED_SETTINGS: Final = ("model.", "data.", DATA_FACT, "train.precision")
_TOKENIZER_SETTING: Final = "data.tokenizer"  # A path, or "bytes".
# These settings may change, although `_FIXED_SETTINGS` has their prefix. The data itself may not
# change: DATA_FACT has its digest.
_CHANGEABLE_SETTINGS: Final = ("data.source", "data.validation", "data.microbatch_size")
# Prefixes of settings. A resumed run does not print changes of settings with these prefixes.
_UNREPORTED_SETTINGS: Final = ("output.", "data.source", "data.validation", "train.checkpoint_dir",
                  "train.checkpoint_every",
                  "train.checkpoint_keep", "train.resume", "train.shutdown_grace",
                  "train.log_every",
                  "train.timeout", "train.threads", "train.on_nonfinite")  # fmt: skip


@dataclass(frozen=True)
class RunIdentity:
    """The name, the settings and the newest checkpoint of a run.

    Args:
        name: The random name. "" if the checkpoint has no name.
        settings: The settings as text, by "section.name", and `Corpus.facts`, which describe the
            data.
        step: The step of the newest checkpoint, or 0 if there is none.
    """

    name: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    step: int = 0

    @staticmethod
    def from_config(config: Config, data: Mapping[str, str]) -> RunIdentity:
        """Return the run that a configuration resumes, or a new run.

        Args:
            config: The configuration of the run.
            data: `Corpus.facts` of the run.

        Raises:
            UsageError: The data or a fixed setting is not the same as in the resumed run.
        """
        settings = config.setting_texts | dict(data)
        previous_run = find_resumed_run(config)
        if previous_run is None:
            return RunIdentity(token_hex(8), settings)
        _require_same_settings(config, previous_run, settings)
        return RunIdentity(previous_run.name or token_hex(8), settings, previous_run.step)

    @property
    def extra_state(self) -> dict[str, Any]:
        """Return the name and the settings, as each checkpoint stores them."""
        return {"run": self.name, "settings": dict(self.settings)}

    def describe_changes(self, extra_state: Mapping[str, Any]) -> str:
        """Return a text with the settings that differ from those in a checkpoint.

        Args:
            extra_state: The `extra_state` that the checkpoint contains.

        Returns:
            The changes, separated by commas. "" if there are none.
        """
        previous_settings = _parse_settings(extra_state)
        changes = [
            f"{name} {previous_settings[name]} to {value}"
            for name, value in self.settings.items()
            if previous_settings.get(name, value) != value
            and not name.startswith(_UNREPORTED_SETTINGS)
        ]
        return ", ".join(changes)

    def write(self, directory: str | Path) -> None:
        """Write `run.json` into a directory, so that the directory belongs to this run.

        Args:
            directory: The checkpoint directory or the output directory.
        """
        with atomic_write(Path(directory, RUN_FILE)) as temporary, temporary.open("w") as file:
            json.dump(self.extra_state, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())

    def owns_directory(self, directory: str | Path) -> bool:
        """Return whether a directory belongs to this run.

        Args:
            directory: The checkpoint directory or the output directory.
        """
        return bool(self.name) and read_run_name(directory) == self.name


def read_run_name(directory: str | Path) -> str:
    """Return the name of the run to which a directory belongs, or "" if there is none.

    Args:
        directory: The checkpoint directory or the output directory.
    """
    return str(_read_run_file(Path(directory, RUN_FILE)).get("run", ""))


def find_resumed_run(config: Config) -> RunIdentity | None:
    """Return the run that a configuration resumes.

    Args:
        config: The configuration of the run.

    Returns:
        The run of the newest readable checkpoint, or of `run.json` if there is no checkpoint. None
        for a new run.
    """
    folder = config.train.checkpoint_dir
    if folder is None or config.train.resume == "no":
        return None
    for step in reversed(CheckpointDirectory(folder).list_steps()):
        try:
            state = CheckpointDirectory(folder).load_manifest(step).state["extra"]
        except (SchedirError, OSError, ValueError, LookupError, TypeError):
            continue  # The checkpoint is incomplete. `load` reports this.
        return RunIdentity(str(state.get("run", "")), _parse_settings(state), step)
    state = _read_run_file(Path(folder, RUN_FILE))
    return RunIdentity(str(state["run"]), _parse_settings(state)) if "run" in state else None


def require_resumable(config: Config) -> None:
    """Check the checkpoint directory against `train.resume` and the settings of the saved run.

    Args:
        config: The configuration of the run.

    Raises:
        UsageError: `train.resume` is "must", and there is no checkpoint. Or `train.resume` is "no",
            there are checkpoints, and `output.overwrite` is false. Or a fixed setting is not the
            same as in the run of the checkpoints.
    """
    folder, resume = config.train.checkpoint_dir, config.train.resume
    if folder is None:
        return
    steps = CheckpointDirectory(folder).list_steps()
    if resume == "must" and not steps:
        raise UsageError(
            f"resume = 'must' needs a checkpoint, and {folder} has none",
            hint="--set train.resume=auto begins at step 1 if there is no checkpoint",
            fields=["resume", "checkpoint_dir"],
        )
    if resume == "no" and steps and not config.output.overwrite:
        raise UsageError(
            f"{folder} has checkpoints of an earlier run, the newest of step {steps[-1]}",
            hint="--set train.resume=auto resumes from it, --set train.checkpoint_dir=... writes "
            "elsewhere, --set output.overwrite=true removes them at the first step",
            fields=["checkpoint_dir", "resume", "overwrite"],
        )
    previous_run = find_resumed_run(config)
    if previous_run is not None:
        _require_same_settings(config, previous_run, config.setting_texts)


def _require_same_settings(
    config: Config, previous_run: RunIdentity, settings: Mapping[str, str]
) -> None:
    # A run of an older version may lack a setting. That run used the current default.
    default_settings = Config(model=type(config.model)()).setting_texts | {
        "model.kind": get_model_kind(GPTConfig())
    }
    for name, value in settings.items():
        had = previous_run.settings.get(name, default_settings.get(name, value))
        if had == value or name in _CHANGEABLE_SETTINGS or not name.startswith(_FIXED_SETTINGS):
            continue
        data = previous_run.settings.get(DATA_FACT)
        if (
            name == _TOKENIZER_SETTING
            and "bytes" not in {had, value}
            and data == settings.get(DATA_FACT, data)
        ):
            continue  # The tokenizer file has moved. Its tokens are the same.
        source = f"the checkpoint of step {previous_run.step}" if previous_run.step else "the run"
        raise UsageError(
            f"{source} in {config.train.checkpoint_dir} has {name} {had}, but the configuration "
            f"has {value}",
            hint="--set train.checkpoint_dir=... writes elsewhere",
            fields=[name.rpartition(".")[2], "checkpoint_dir"]
            if name != DATA_FACT
            else ["checkpoint_dir"],
        )


def _parse_settings(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings of a checkpoint by their current names."""
    stored_settings = state.get("settings")
    settings = {}
    for name, value in stored_settings.items() if isinstance(stored_settings, dict) else ():
        # An older checkpoint has the former names.
        current = RENAMED_SETTINGS.get(str(name), str(name))
        settings[current] = get_current_value(current.rpartition(".")[2], str(value))
    return settings


def _read_run_file(path: Path) -> dict[str, Any]:
    """Return the contents of a `run.json`, or {} if it is missing or invalid."""
    try:
        contents = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return contents if isinstance(contents, dict) else {}
