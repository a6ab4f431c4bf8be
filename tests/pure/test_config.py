"""Tests that valid configurations are read, and that errors of invalid ones name the line."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import schedir
from schedir.errors import ConfigError, ParseError, SchedirError, UsageError
from schedir.ir.cost.sizes import Sizes
from schedir.ir.isa.instructions import RECOMPUTE
from schedir.models.gpt_config import GPTConfig
from schedir.schedules import get_built_in_schedules
from schedir.training.config.config_file import read_config
from schedir.training.config.run_config import Config
from schedir.training.learning_rate import compute_learning_rate
from schedir.training.train import build_program
from tests.cases import each_value

GOLDEN = Path(__file__).parents[1] / "golden" / "refused_configs.txt"
DASHES, SEPARATOR = "-" * 20 + "\n", "=" * 20 + "\n"
FULL = """\
# A run on eight processes.
[model]
layers = 4
heads = 4

[pipeline]
schedule = "interleaved"
ranks = 2
stages_per_rank = 2
tp = 2
dp = 2

[data]
source = ["a.txt", "b/*.txt"]

[train]
lr = 1
betas = [0.5, 0.75]
"""


def write_config(folder: Path, text: str) -> str:
    path = folder / "run.toml"
    path.write_text(text)
    return str(path)


def test_empty_file_gives_defaults(tmp_path: Path) -> None:
    assert read_config(write_config(tmp_path, "")) == Config()


def test_file_is_read(tmp_path: Path) -> None:
    config = read_config(write_config(tmp_path, FULL))
    assert config.model == GPTConfig(layers=4, heads=4)
    assert config.pipeline.shape == schedir.PipelineShape(2, 8, 2)
    assert config.world_size == 8
    assert config.data.source == ("a.txt", "b/*.txt")
    assert config.train.lr == 1.0 and isinstance(config.train.lr, float)
    assert config.train.betas == (0.5, 0.75)


def test_demo_config_is_for_four_processes() -> None:
    config = read_config(str(Path(__file__).resolve().parents[2] / "examples" / "demo.toml"))
    assert config.world_size == 4 and config.pipeline.shape.stages == 4


def test_set_options_override_file(tmp_path: Path) -> None:
    sets = [
        "pipeline.microbatches=4",
        "pipeline.schedule = gpipe",
        'output.dir="a b"',
        "pipeline.stages_per_rank=1",
        "pipeline.layers_per_stage=[1, 3]",
        "model.tied=false",
    ]
    config = read_config(write_config(tmp_path, FULL), sets)
    assert config.pipeline.shape == schedir.PipelineShape(2, 4)
    assert config.pipeline.schedule == "gpipe" and config.pipeline.layers_per_stage == (1, 3)
    assert config.output.dir == "a b" and not config.model.tied


def test_number_lists_need_no_brackets(tmp_path: Path) -> None:
    sets = ["pipeline.placement=0,1,1,0", "train.betas=0.5, 0.75", "pipeline.ranks=2"]
    config = read_config(write_config(tmp_path, ""), sets)
    assert config.pipeline.placement == (0, 1, 1, 0) and config.train.betas == (0.5, 0.75)
    assert read_config(write_config(tmp_path, ""), ["data.source=a,b.txt"]).data.source == "a,b.txt"


def test_schedule_sets_default_placement_and_stages(tmp_path: Path) -> None:
    vee = write_config(tmp_path, "[pipeline]\nschedule = 'v_half'\nranks = 2")
    assert read_config(vee).pipeline.shape == schedir.PipelineShape(2, 8, 2, "vee")
    # A placement that is given explicitly is kept, though the schedule may refuse it later.
    assert read_config(vee, ["pipeline.placement=0,1,1,0"]).pipeline.placement == (0, 1, 1, 0)
    assert (
        read_config(vee, ["pipeline.stages_per_rank=4", "model.layers=8"]).pipeline.shape.stages
        == 8
    )
    with_option = read_config(vee, ["pipeline.schedule=interleaved(group=2)"]).pipeline
    assert (with_option.placement, with_option.stages_per_rank) == ("loop", 2)
    mapped = read_config(vee, ["pipeline.schedule=interleaved", "pipeline.placement=0,1"]).pipeline
    assert mapped.shape == schedir.PipelineShape(2, 8, placement=(0, 1))
    explicit = read_config(
        vee, ["pipeline.schedule=interleaved", "pipeline.stages_per_rank=1"]
    ).pipeline
    assert explicit.stages_per_rank == 1


def test_schedule_options_and_overlap_change_program(tmp_path: Path) -> None:
    sets = ["pipeline.ranks=2", "pipeline.stages_per_rank=2", "pipeline.microbatches=8"]

    def build(*settings: str) -> schedir.Program:
        return build_program(read_config(write_config(tmp_path, ""), [*sets, *settings]))

    plain = build("pipeline.schedule=interleaved")
    grouped = build("pipeline.schedule=interleaved(group=4)")
    assert grouped.digest != plain.digest
    without_overlap = build("pipeline.schedule=interleaved", "pipeline.overlap=false")
    assert without_overlap.digest != plain.digest
    assert sorted(without_overlap.words) != sorted(plain.words)
    minimal = build("pipeline.schedule=interleaved", "pipeline.buffer_sharing=minimal")
    assert minimal.slots and not plain.slots and minimal.streams == plain.streams
    with pytest.raises(schedir.errors.UsageError, match="'few' is not known"):
        build("pipeline.buffer_sharing=few")
    assert build("pipeline.schedule=interleaved", "pipeline.buffer_sharing=none") == plain
    draft = tmp_path / "draft.sched"
    draft.write_text(
        schedir.to_text(schedir.expand_schedule(schedir.schedules.interleaved, plain.shape))
    )
    from_draft = build_program(
        read_config(write_config(tmp_path, f"[pipeline]\nschedule = '{draft}'\noverlap = true\n"))
    )
    assert from_draft.digest == plain.digest


def test_gpu_programs_share_buffers_by_default(tmp_path: Path) -> None:
    path = write_config(tmp_path, "[pipeline]\nranks = 4\nmicrobatches = 16\nschedule = 'gpipe'")
    gpu, file = "train.device=cuda", tmp_path / "own.sched"

    def build(*sets: str) -> schedir.Program:
        return build_program(read_config(path, sets))

    unshared, minimal = build(), build("pipeline.buffer_sharing=minimal")
    assert (
        build(gpu) == build("pipeline.buffer_sharing=latency_preserving") not in (unshared, minimal)
    )
    assert build(gpu, "pipeline.buffer_sharing=none") == unshared and not unshared.slots
    # The run keeps the slots of a program file.
    for written, expected in ((unshared, build(gpu)), (minimal, minimal)):
        file.write_text(schedir.to_text(written))
        assert build(gpu, f"pipeline.schedule={file}").slots == expected.slots


@pytest.mark.parametrize(
    ("schedule", "transport"),
    each_value(
        sorted({*get_built_in_schedules()} - {"forward_only"}), ["nccl_per_edge", "nccl_grouped"]
    ),
)
def test_built_in_schedules_compile_with_gpu_slots(
    tmp_path: Path, schedule: str, transport: str
) -> None:
    sets = [f"pipeline.schedule={schedule}", f"train.transport={transport}", "model.layers=8"]
    text = "[pipeline]\nranks = 4\nmicrobatches = 16\ntp = 2\n[train]\ndevice = 'cuda'"
    config = read_config(write_config(tmp_path, text), sets)
    assert build_program(config).slots


def read_refusal(text: str, folder: Path) -> str:
    """Return the message that refuses a configuration, which has the location of the error."""
    with pytest.raises(ConfigError) as caught:
        read_config(write_config(folder, text))
    error = caught.value
    message = str(error).replace(f"{folder}/", "")
    assert message.startswith(f"run.toml, line {error.line}, column {error.column}: ")
    return message


def test_golden_configs_are_refused_with_message(tmp_path: Path) -> None:
    cases = [case.split(DASHES)[0] for case in GOLDEN.read_text().split(SEPARATOR)]
    actual = SEPARATOR.join(f"{text}{DASHES}{read_refusal(text, tmp_path)}\n" for text in cases)
    if "UPDATE_GOLDEN" in os.environ:
        GOLDEN.write_text(actual)
    assert actual == GOLDEN.read_text()


@pytest.mark.parametrize(
    ("text", "line", "column"),
    [
        (f"[train]\nwarmup = 1{'0' * 400}", 2, 1),
        ("[model]\nlayers = ", 2, 10),  # these three are no TOML
        ("[model]\nlayers 4", 2, 8),
        ("[model", 1, 7),
    ],
)
def test_invalid_config_error_has_line_and_column(
    tmp_path: Path, text: str, line: int, column: int
) -> None:
    message = read_refusal(text, tmp_path)
    assert message.startswith(f"run.toml, line {line}, column {column}: ")
    assert "integer" in message or "TOML" in message


def test_set_option_without_value_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"SECTION\.NAME=VALUE"):
        read_config(write_config(tmp_path, ""), ["pipeline.ranks"])


def test_indivisible_layers_error_hints_at_division(tmp_path: Path) -> None:
    path = write_config(tmp_path, "[model]\nlayers = 5\n[pipeline]\nranks = 2")
    with pytest.raises(ConfigError) as error:
        read_config(path)
    assert error.value.line == 2 and "[3, 2]" in error.value.hint
    assert read_config(path, ["pipeline.layers_per_stage=[3, 2]"]).pipeline.layers_per_stage == (
        3,
        2,
    )


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_unreadable_file_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "run.toml"
    if content:
        path.write_bytes(content)
    with pytest.raises(UsageError) as error:
        read_config(str(path))
    assert str(path) in str(error.value)
    with pytest.raises(UsageError):
        read_config(str(tmp_path))


@pytest.fixture
def program_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.sched"
    shape = schedir.PipelineShape(ranks=4, microbatches=6, placement=(0, 1, 2, 3))
    path.write_text(schedir.to_text(schedir.compile(schedir.schedules.gpipe, shape, tp=2)))
    return path


def test_program_file_sets_shape_and_tp(tmp_path: Path, program_file: Path) -> None:
    config = read_config(
        write_config(tmp_path, f"[pipeline]\nschedule = '{program_file}'\nranks = 4")
    )
    assert config.pipeline.shape == schedir.PipelineShape(4, 6, placement=(0, 1, 2, 3))
    assert config.pipeline.tp == 2 and config.world_size == 8


@pytest.mark.parametrize("setting", ["ranks = 2", "microbatches = 8", "tp = 1", "dp = 2"])
def test_setting_that_contradicts_program_file_is_refused(
    tmp_path: Path, program_file: Path, setting: str
) -> None:
    with pytest.raises(ConfigError) as error:
        read_config(write_config(tmp_path, f"[pipeline]\nschedule = '{program_file}'\n{setting}"))
    assert error.value.line == 3 and str(program_file) in error.value.fact


def test_overlap_of_lowered_program_is_refused(tmp_path: Path, program_file: Path) -> None:
    with pytest.raises(ConfigError) as error:
        read_config(
            write_config(tmp_path, f"[pipeline]\nschedule = '{program_file}'\noverlap = true")
        )
    assert error.value.line == 3


def test_draft_file_accepts_tp(tmp_path: Path) -> None:
    path = tmp_path / "draft.sched"
    path.write_text(
        schedir.to_text(
            schedir.expand_schedule(schedir.schedules.gpipe, schedir.PipelineShape(2, 4))
        )
    )
    config = read_config(write_config(tmp_path, f"[pipeline]\nschedule = '{path}'\ntp = 2"))
    assert (config.pipeline.ranks, config.pipeline.tp) == (2, 2)


def test_setting_overrides_tp_of_draft_file(tmp_path: Path) -> None:
    drafted = replace(
        schedir.expand_schedule(schedir.schedules.gpipe, schedir.PipelineShape(2, 4)), tp=2
    )
    path = tmp_path / "draft.sched"
    path.write_text(schedir.to_text(drafted))
    text = f"[pipeline]\nschedule = '{path}'\n"
    assert read_config(write_config(tmp_path, text)).pipeline.tp == 2
    assert read_config(write_config(tmp_path, text + "tp = 1")).pipeline.tp == 1


def test_invalid_program_file_error_has_line(tmp_path: Path, program_file: Path) -> None:
    program_file.write_text(program_file.read_text().replace("send_act", "sent_act"))
    with pytest.raises(ParseError) as error:
        read_config(write_config(tmp_path, f"[pipeline]\nschedule = '{program_file}'"))
    assert error.value.line > 5
    program_file.unlink()
    with pytest.raises(SchedirError):
        read_config(write_config(tmp_path, f"[pipeline]\nschedule = '{program_file}'"))


def test_reading_config_does_not_import_torch(tmp_path: Path) -> None:
    code = """
import sys, schedir.training.config.config_file as c
c.read_config(sys.argv[1])
print('torch' in sys.modules)"""
    completed = subprocess.run(
        [sys.executable, "-c", code, write_config(tmp_path, FULL)], capture_output=True, text=True
    )
    assert completed.stdout == "False\n", completed.stderr


def test_learning_rate_warms_up_and_decays() -> None:
    train: Any = Config().train
    rates = [compute_learning_rate(train, step) for step in range(train.steps)]
    top = rates.index(max(rates))
    assert rates[: top + 1] == sorted(rates[: top + 1]) and max(rates) == train.lr
    assert rates[top:] == sorted(rates[top:], reverse=True) and rates[-1] >= train.min_lr


def test_recompute_fit_waits_for_sizes(tmp_path: Path) -> None:
    """`recompute = "fit"` needs sizes. Any other value takes effect without sizes."""
    path = tmp_path / "config.toml"
    path.write_text('[pipeline]\nranks = 2\n[memory]\nmemory_limit = "15"\nrecompute = "fit"\n')
    sizes = Sizes(saved=10, recompute_inputs=1)
    config = read_config(str(path), [])
    assert RECOMPUTE not in config.request.program.used_opcodes
    assert RECOMPUTE in config.request_with_sizes(sizes).program.used_opcodes
    path.write_text('[pipeline]\nranks = 2\n[memory]\nrecompute = "all"\n')
    assert RECOMPUTE in read_config(str(path), []).request.program.used_opcodes
