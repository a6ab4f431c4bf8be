"""Tests of what a resumed run reports about changed settings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from schedir.errors import UsageError
from schedir.training.config.config_file import read_config
from schedir.training.resume_checks import RunIdentity, require_resumable
from schedir.training.train import run
from tests import tokens
from tests.cpu.train_command import ONE_PROCESS


def make_options(folder: Path, steps: int, *settings: str) -> list[str]:
    """Return the options of a run of some steps that saves each second one."""
    return [*ONE_PROCESS, f"train.steps={steps}", "output.record=false", "train.checkpoint_every=2",
            f'output.dir="{folder / "out"}"', f'train.checkpoint_dir="{folder / "saved"}"',
            *settings]  # fmt: skip


def find_resumed_line(output: str) -> str:
    return next(line for line in output.splitlines() if line.startswith("resumed"))


def test_changed_microbatch_size_and_held_out_text_are_reported(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held_out_file = tmp_path / "held.txt"
    held_out_file.write_text("some text " * 20)
    settings = (f'data.validation="{held_out_file}"', "train.evaluate_every=2")
    assert run(config, make_options(tmp_path, 2, *settings)) == 0
    held_out_file.write_text("other text" * 20)
    assert run(config, make_options(tmp_path, 4, *settings, "data.microbatch_size=3")) == 0
    line = find_resumed_line(capsys.readouterr().out)
    assert "data.microbatch_size 2 to 3, " in line
    assert re.search(
        r", the held-out data 200 tokens of uint8 \((\w+)\), in windows of (\d+) to "
        r"200 tokens of uint8 \((?!\1)\w+\), in windows of \2$",
        line,
    ), line


def test_fewer_steps_than_complete_are_reported(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(config, make_options(tmp_path, 2)) == 0
    assert run(config, make_options(tmp_path, 1)) == 0
    output = capsys.readouterr().out
    message = "2 steps of the run are complete, and train.steps is 1: there is nothing to do"
    assert f"\n{message}\n" in output


def test_moved_tokenizer_is_accepted_and_another_is_refused(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (tmp_path / "text.txt").read_text()
    tokenizers = [tokens.train_tokenizer([text], vocab) for vocab in (264, 262)]
    for name, number in (("one.json", 0), ("other.json", 0), ("third.json", 1)):
        (tmp_path / name).write_text(tokenizers[number])

    def resume(name: str, steps: int) -> int:
        path = f'data.tokenizer="{tmp_path / name}"'
        return run(config, make_options(tmp_path, steps, path, "model.vocab=264"))

    assert resume("one.json", 2) == 0
    assert resume("other.json", 4) == 0
    assert "changed since: data.tokenizer " in find_resumed_line(capsys.readouterr().out)
    with pytest.raises(UsageError) as error:
        resume("third.json", 6)
    assert "has data.tokenizer " in error.value.fact
    assert error.value.fields == ("tokenizer", "checkpoint_dir")


@pytest.mark.parametrize(
    ("old_kind", "sets"),
    [("gpt", ["model.window=8"]), ("gpt", ["model.kind=llama"]), ("llama", ["model.window=8"])],
)
def test_setting_missing_in_old_checkpoint_has_default(
    config: str, tmp_path: Path, old_kind: str, sets: list[str]
) -> None:
    """A missing setting had its default: older versions had no windows or kinds."""
    settings = [f'train.checkpoint_dir="{tmp_path}"', f"model.kind={old_kind}"]
    setting_texts = read_config(config, settings).setting_texts
    new_names = {"model.window", "model.stride"} | ({"model.kind"} if old_kind == "gpt" else set())
    old_texts = {name: value for name, value in setting_texts.items() if name not in new_names}
    RunIdentity("it", old_texts).write(tmp_path)
    require_resumable(read_config(config, settings))
    with pytest.raises(UsageError, match=sets[0].split("=")[0]):
        require_resumable(read_config(config, [*settings, *sets]))


def test_settings_under_old_names_are_compared(tmp_path: Path) -> None:
    """A checkpoint of an older version has its settings under their old names."""
    current_settings = {"train.clip_grad_norm": "0.5", "pipeline.buffer_sharing": "minimal"}
    old_settings = {"train.clip": "1.0", "pipeline.slots": "fewest"}
    changes = RunIdentity("it", current_settings).describe_changes({"settings": old_settings})
    assert changes == "train.clip_grad_norm 1.0 to 0.5"
