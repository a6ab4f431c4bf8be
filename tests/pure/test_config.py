"""Tests of configurations: which are read, which are refused, and what the error points to."""

from __future__ import annotations

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


def write(folder: Path, text: str) -> str:
    path = folder / "run.toml"
    path.write_text(text)
    return str(path)


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    assert read_config(write(tmp_path, "")) == Config()


def test_a_file_is_read(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, FULL))
    assert config.model == GPTConfig(layers=4, heads=4)
    assert config.pipeline.shape == schedir.PipelineShape(2, 8, 2)
    assert config.world_size == 8
    assert config.data.source == ("a.txt", "b/*.txt")
    assert config.train.lr == 1.0 and isinstance(config.train.lr, float)
    assert config.train.betas == (0.5, 0.75)


def test_the_demo_is_for_four_processes() -> None:
    config = read_config(str(Path(__file__).resolve().parents[2] / "examples" / "demo.toml"))
    assert config.world_size == 4 and config.pipeline.shape.stages == 4


def test_sets_come_on_top(tmp_path: Path) -> None:
    sets = [
        "pipeline.microbatches=4",
        "pipeline.schedule = gpipe",
        'output.dir="a b"',
        "pipeline.stages_per_rank=1",
        "pipeline.layers_per_stage=[1, 3]",
        "model.tied=false",
    ]
    config = read_config(write(tmp_path, FULL), sets)
    assert config.pipeline.shape == schedir.PipelineShape(2, 4)
    assert config.pipeline.schedule == "gpipe" and config.pipeline.layers_per_stage == (1, 3)
    assert config.output.dir == "a b" and not config.model.tied


def test_lists_of_numbers_need_no_brackets(tmp_path: Path) -> None:
    sets = ["pipeline.placement=0,1,1,0", "train.betas=0.5, 0.75", "pipeline.ranks=2"]
    config = read_config(write(tmp_path, ""), sets)
    assert config.pipeline.placement == (0, 1, 1, 0) and config.train.betas == (0.5, 0.75)
    assert read_config(write(tmp_path, ""), ["data.source=a,b.txt"]).data.source == "a,b.txt"


def test_a_schedule_brings_its_placement(tmp_path: Path) -> None:
    vee = write(tmp_path, "[pipeline]\nschedule = 'v_half'\nranks = 2")
    assert read_config(vee).pipeline.shape == schedir.PipelineShape(2, 8, 2, "vee")
    # A placement that is given explicitly is kept, though the schedule may refuse it later.
    assert read_config(vee, ["pipeline.placement=0,1,1,0"]).pipeline.placement == (0, 1, 1, 0)
    assert (
        read_config(vee, ["pipeline.stages_per_rank=4", "model.layers=8"]).pipeline.shape.stages
        == 8
    )
    partly = read_config(vee, ["pipeline.schedule=interleaved(group=2)"]).pipeline
    assert (partly.placement, partly.stages_per_rank) == ("loop", 2)
    mapped = read_config(vee, ["pipeline.schedule=interleaved", "pipeline.placement=0,1"]).pipeline
    assert mapped.shape == schedir.PipelineShape(2, 8, placement=(0, 1))
    told = read_config(
        vee, ["pipeline.schedule=interleaved", "pipeline.stages_per_rank=1"]
    ).pipeline
    assert told.stages_per_rank == 1


def test_options_and_overlap_reach_the_program(tmp_path: Path) -> None:
    sets = ["pipeline.ranks=2", "pipeline.stages_per_rank=2", "pipeline.microbatches=8"]

    def program(*more: str) -> schedir.Program:
        return build_program(read_config(write(tmp_path, ""), [*sets, *more]))

    plain = program("pipeline.schedule=interleaved")
    wide = program("pipeline.schedule=interleaved(group=4)")
    assert wide.digest != plain.digest
    late = program("pipeline.schedule=interleaved", "pipeline.overlap=false")
    assert late.digest != plain.digest and sorted(late.words) != sorted(plain.words)
    few = program("pipeline.schedule=interleaved", "pipeline.buffer_sharing=minimal")
    assert few.slots and not plain.slots and few.streams == plain.streams
    with pytest.raises(schedir.errors.UsageError, match="'few' is not known"):
        program("pipeline.buffer_sharing=few")
    assert program("pipeline.schedule=interleaved", "pipeline.buffer_sharing=none") == plain
    draft = tmp_path / "draft.sched"
    draft.write_text(
        schedir.to_text(schedir.expand_schedule(schedir.schedules.interleaved, plain.shape))
    )
    same = build_program(
        read_config(write(tmp_path, f"[pipeline]\nschedule = '{draft}'\noverlap = true\n"))
    )
    assert same.digest == plain.digest


def test_on_gpus_values_share_slots_unless_told(tmp_path: Path) -> None:
    path = write(tmp_path, "[pipeline]\nranks = 4\nmicrobatches = 16\nschedule = 'gpipe'")
    gpu, file = "train.device=cuda", tmp_path / "own.sched"

    def program(*sets: str) -> schedir.Program:
        return build_program(read_config(path, sets))

    own, few = program(), program("pipeline.buffer_sharing=minimal")
    assert program(gpu) == program("pipeline.buffer_sharing=latency_preserving") not in (own, few)
    assert program(gpu, "pipeline.buffer_sharing=none") == own and not own.slots
    for said, there in (
        (own, program(gpu)),
        (few, few),
    ):  # the slots that a program file gives are kept
        file.write_text(schedir.to_text(said))
        assert program(gpu, f"pipeline.schedule={file}").slots == there.slots


@pytest.mark.parametrize("schedule", sorted({*get_built_in_schedules()} - {"forward_only"}))
@pytest.mark.parametrize("transport", ["nccl_per_edge", "nccl_grouped"])
def test_no_built_in_schedule_is_refused_for_the_slots_of_gpus(
    tmp_path: Path, schedule: str, transport: str
) -> None:
    sets = [f"pipeline.schedule={schedule}", f"train.transport={transport}", "model.layers=8"]
    text = "[pipeline]\nranks = 4\nmicrobatches = 16\ntp = 2\n[train]\ndevice = 'cuda'"
    config = read_config(write(tmp_path, text), sets)
    assert build_program(config).slots


@pytest.mark.parametrize(
    ("text", "line", "column", "word"),
    [
        ("[model]\nlayer = 4", 2, 1, "'layers'"),
        ("[modell]\nlayers = 4", 1, 2, "'model'"),
        ("[model]\n\n  layers = 'x'", 3, 3, "integer"),
        ("[model]\nlayers = true", 2, 1, "integer"),
        ("model.layers = 4.0", 1, 1, "integer"),
        ("model = { heads = 4, layer = 4 }", 1, 22, "'layers'"),
        ("model = 4", 1, 1, "section"),
        ("[[model]]\nlayers = 4", 1, 3, "section"),
        ("[model.size]\nlayers = 4", 1, 2, "size"),
        ("[pipeline]\nmicrobatches = 0", 2, 1, "microbatches"),
        ("[pipeline]\nmicrobatches = -1", 2, 1, "microbatches"),
        ("[pipeline]\nmicrobatches = 4.5", 2, 1, "integer"),
        ("[pipeline]\nmicrobatches = 1048577", 2, 1, "1048576"),
        ("[pipeline]\nranks = 0", 2, 1, "ranks"),
        ("[pipeline]\ntp = 0", 2, 1, "at least 1"),
        ("[pipeline]\ndp = 70000", 2, 1, "65535"),
        ("[pipeline]\nplacement = 'zigzag'", 2, 1, "'loop'"),
        ("[pipeline]\nplacement = [0, 'x']", 2, 1, "integers"),
        ("[pipeline]\nlayers_per_stage = [1, 2]", 2, 1, "1 stages"),
        ("[train]\nlr = nan", 2, 1, "number"),
        ("[train]\ncheckpoint_every = 5", 2, 1, "train.checkpoint_dir"),
        ("[train]\nsteps = 5\ncheckpoint_keep = 5", 3, 1, "train.checkpoint_dir"),
        ("[memory]\nrecompute = true", 2, 1, 'recompute = "all"'),
        ("[train]\nlr = -1", 2, 1, "at least 0"),
        ("[train]\nlr = inf", 2, 1, "at least 0"),
        ("[train]\nbetas = [0.9]", 2, 1, "2 numbers"),
        ("[train]\nbetas = [0.9, 1]", 2, 1, "below 1"),
        ("[train]\n\nlr = 1e-4\nmin_lr = 1e-3", 4, 1, "min_lr"),
        ("[output]\ntrace = \"t\"\nrecord = false", 2, 1, "trace"),
        ("[train]\nsteps = 1\ntimeout = 0", 3, 1, "at least 1"),
        ("[train]\ntimeout = 1e300", 2, 1, "below 10000000"),
        ("[train]\nthreads = 1_000_000_000", 2, 1, "below 1025"),
        (f"[train]\nwarmup = 1{'0' * 400}", 2, 1, "integer"),
        ("[model]\nhidden = 10\nheads = 4", 2, 1, "heads 4"),
        ("[model]\nvocab = 0", 2, 1, "vocab"),
        ("[data]\nsource = 1", 2, 1, "string"),
        ("[model]\nlayers = ", 2, 10, "TOML"),
        ("[model]\nlayers 4", 2, 8, "TOML"),
        ("[model]\nlayers = 4\nlayers = 5", 3, 1, "set twice"),
        ("[model", 1, 7, "TOML"),
        ("[pipeline]\n'ranks' = 'two'", 2, 1, "integer"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_with_its_place(
    tmp_path: Path, text: str, line: int, column: int, word: str
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        read_config(path)
    assert (error.value.location, error.value.line, error.value.column) == (path, line, column)
    assert word in str(error.value)


@pytest.mark.parametrize(
    ("option", "word"),
    [
        ("pipeline.ranks", "SECTION.NAME=VALUE"),
        ("ranks=2", "SECTION.NAME=VALUE"),
        ("=", "SECTION.NAME=VALUE"),
        ("pipelines.ranks=2", "'pipeline'"),
        ("pipeline.rank=2", "'ranks'"),
        ("pipeline.ranks.x=2", "'ranks'"),
        ("pipeline.ranks=two", "'two'"),
        ("pipeline.ranks=", "integer"),
        ("pipeline.placement=[0,", "placement"),
        ("pipeline.microbatches=0", "microbatches"),
        ("model.heads=3", "hidden 128"),
        ("pipeline.tp=3", "tp 3"),
        ("pipeline.ranks=3", "3 stages"),
    ],
)
def test_a_wrong_set_is_refused(tmp_path: Path, option: str, word: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_config(write(tmp_path, ""), [option])
    assert word in str(error.value)


def test_a_share_of_the_source_is_not_turned_into_a_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.validation must be a number") as error:
        read_config(write(tmp_path, ""), ["data.validation=1.5"])
    assert error.value.hint == ""


def test_layers_that_cannot_be_divided_are_refused_with_a_division(tmp_path: Path) -> None:
    path = write(tmp_path, "[model]\nlayers = 5\n[pipeline]\nranks = 2")
    with pytest.raises(ConfigError) as error:
        read_config(path)
    assert error.value.line == 2 and "[3, 2]" in error.value.hint
    assert read_config(path, ["pipeline.layers_per_stage=[3, 2]"]).pipeline.layers_per_stage == (
        3,
        2,
    )


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "run.toml"
    if content:
        path.write_bytes(content)
    with pytest.raises(UsageError) as error:
        read_config(str(path))
    assert str(path) in str(error.value)
    with pytest.raises(UsageError):
        read_config(str(tmp_path))


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "mine.sched"
    shape = schedir.PipelineShape(ranks=4, microbatches=6, placement=(0, 1, 2, 3))
    path.write_text(schedir.to_text(schedir.compile(schedir.schedules.gpipe, shape, tp=2)))
    return path


def test_a_program_brings_its_shape(tmp_path: Path, program: Path) -> None:
    config = read_config(write(tmp_path, f"[pipeline]\nschedule = '{program}'\nranks = 4"))
    assert config.pipeline.shape == schedir.PipelineShape(4, 6, placement=(0, 1, 2, 3))
    assert config.pipeline.tp == 2 and config.world_size == 8


@pytest.mark.parametrize("setting", ["ranks = 2", "microbatches = 8", "tp = 1", "dp = 2"])
def test_a_program_is_not_contradicted(tmp_path: Path, program: Path, setting: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_config(write(tmp_path, f"[pipeline]\nschedule = '{program}'\n{setting}"))
    assert error.value.line == 3 and str(program) in error.value.fact


def test_a_lowered_program_has_no_overlap_to_choose(tmp_path: Path, program: Path) -> None:
    with pytest.raises(ConfigError) as error:
        read_config(write(tmp_path, f"[pipeline]\nschedule = '{program}'\noverlap = true"))
    assert error.value.line == 3


def test_a_draft_takes_tp_and_dp(tmp_path: Path) -> None:
    path = tmp_path / "draft.sched"
    path.write_text(
        schedir.to_text(
            schedir.expand_schedule(schedir.schedules.gpipe, schedir.PipelineShape(2, 4))
        )
    )
    config = read_config(write(tmp_path, f"[pipeline]\nschedule = '{path}'\ntp = 2"))
    assert (config.pipeline.ranks, config.pipeline.tp) == (2, 2)


def test_a_draft_brings_its_traits_unless_a_setting_says_another(tmp_path: Path) -> None:
    drafted = replace(
        schedir.expand_schedule(schedir.schedules.gpipe, schedir.PipelineShape(2, 4)), tp=2
    )
    path = tmp_path / "draft.sched"
    path.write_text(schedir.to_text(drafted))
    text = f"[pipeline]\nschedule = '{path}'\n"
    assert read_config(write(tmp_path, text)).pipeline.tp == 2
    assert read_config(write(tmp_path, text + "tp = 1")).pipeline.tp == 1


def test_a_program_that_is_none_is_refused_with_its_place(tmp_path: Path, program: Path) -> None:
    program.write_text(program.read_text().replace("send_act", "sent_act"))
    with pytest.raises(ParseError) as error:
        read_config(write(tmp_path, f"[pipeline]\nschedule = '{program}'"))
    assert error.value.line > 5
    program.unlink()
    with pytest.raises(SchedirError):
        read_config(write(tmp_path, f"[pipeline]\nschedule = '{program}'"))


def test_nothing_heavy_is_needed(tmp_path: Path) -> None:
    code = """
import sys, schedir.training.config.config_file as c
c.read_config(sys.argv[1])
print('torch' in sys.modules)"""
    done = subprocess.run(
        [sys.executable, "-c", code, write(tmp_path, FULL)], capture_output=True, text=True
    )
    assert done.stdout == "False\n", done.stderr


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["train.clipp=1"], "--set train.clipp=1: no setting train.clipp"),
        (
            ["train.zero=3"],
            "--set train.zero=3: no setting train.zero\n  hint: did you mean pipeline.zero?",
        ),
        (
            ["train.precision=float16", "pipeline.optimizer_steps=2"],
            "--set train.precision=float16: precision = 'float16' needs optimizer_steps = 1, not "
            "2: the loss scale changes after each update",
        ),
        (["data.seed=x"], "--set data.seed=x: data.seed must be an integer of at least 0"),
    ],
)
def test_messages(tmp_path: Path, sets: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_config(write(tmp_path, ""), sets)
    assert str(error.value).startswith(message)


def test_the_learning_rate_warms_up_and_falls() -> None:
    train: Any = Config().train
    rates = [compute_learning_rate(train, step) for step in range(train.steps)]
    top = rates.index(max(rates))
    assert rates[: top + 1] == sorted(rates[: top + 1]) and max(rates) == train.lr
    assert rates[top:] == sorted(rates[top:], reverse=True) and rates[-1] >= train.min_lr


@pytest.mark.parametrize(
    ("settings", "fact"),
    [
        ('memory_limit = "2X"', "memory_limit must be a number of bytes, not '2X'"),
        ('recompute = "fit"', "needs memory_limit"),
        ("recompute = 7", "must be a string"),
        ('recompute = "all"\nrecompute_at = 3', "must be a string"),
    ],
)
def test_memory_that_cannot_be(settings: str, fact: str, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(f"[memory]\n{settings}\n")
    with pytest.raises(ConfigError, match=fact):
        read_config(str(path), [])


def test_an_unknown_schedule_has_its_line(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('[pipeline]\nranks = 2\nschedule = "1f1b"\n')
    with pytest.raises(ConfigError, match=r"config\.toml, line 3, column 1: '1f1b' is") as caught:
        read_config(str(path), [])
    assert caught.value.hint == "did you mean 'one_f_one_b'?"


def test_memory_is_of_the_program(tmp_path: Path) -> None:
    """`recompute = "fit"` needs the sizes. Any other value applies at once."""
    path = tmp_path / "config.toml"
    path.write_text('[pipeline]\nranks = 2\n[memory]\nmemory_limit = "15"\nrecompute = "fit"\n')
    sizes = Sizes(saved=10, recompute_inputs=1)
    config = read_config(str(path), [])
    assert RECOMPUTE not in config.request.program.used_opcodes
    assert RECOMPUTE in config.request_with_sizes(sizes).program.used_opcodes
    path.write_text('[pipeline]\nranks = 2\n[memory]\nrecompute = "all"\n')
    assert RECOMPUTE in read_config(str(path), []).request.program.used_opcodes
