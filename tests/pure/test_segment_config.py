"""Tests of configurations of training runs in segments and chunks, and of refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from schedir import PipelineShape, compile, schedules, to_text
from schedir.compiler.relower import extract_compute
from schedir.errors import ConfigError
from schedir.ir.isa.instructions import find_segment_collectives
from schedir.passes.splitting.stage_segmentation import split_stages
from schedir.schedules.schedule_expansion import expand_schedule
from schedir.training.config.config_file import read_config
from schedir.training.config.run_config import Config
from schedir.training.config.segmentation import StageSegmentation
from schedir.training.train import build_program

TEXT = """\
[model]
layers = 4

[pipeline]
ranks = 2
microbatches = 4
tp = 2

[data]
microbatch_size = 4
"""

_SUMS = {*find_segment_collectives(sequence_parallel=False)}


@pytest.fixture
def path(tmp_path: Path) -> str:
    (path := tmp_path / "run.toml").write_text(TEXT)
    return str(path)


def write_segment_program(path: str, frozen: int | None, tp: int = 2) -> str:
    """Write the file of a program in segments, with two stages of two layers."""
    segmented = split_stages(
        replace(expand_schedule(schedules.one_f_one_b, PipelineShape(2, 4)), tp=tp), 9
    )
    tied = frozen is None
    (file := Path(path).with_name("x.sched")).write_text(
        to_text(
            compile(segmented, clip_grad_norm=True, tied_weights=tied, frozen_stages=frozen or 0)
        )
    )
    return f"pipeline.schedule={file}"


@pytest.mark.parametrize(
    ("sets", "pieces"),
    [
        (["stage_segments=layers"], (9, 9)),
        (["stage_segments=9"], (9, 9)),
        (["stage_segments=fgfgfgfg"], (9, 9)),
        (["stage_segments=9,1"], (9, 1)),
        (["stage_segments=layers", "layers_per_stage=1,3"], (5, 13)),
        (["stage_segments=1"], (1, 1)),
        (["stage_segments=layers", "tp=1"], (9, 9)),
        (["microbatch_chunks=2"], (1, 1)),
        (["stage_segments=layers", "microbatch_chunks=4"], (9, 9)),
    ],
)
def test_segment_settings_are_read(path: str, sets: list[str], pieces: tuple[int, ...]) -> None:
    config = read_config(path, [f"pipeline.{setting}" for setting in sets])
    program, chunks = build_program(config), 4 // config.segmentation.microbatch_size
    assert config.segmentation.segments_per_stage == pieces and sum(pieces) == program.shape.stages
    assert program.shape.microbatches == 4 * chunks
    assert bool(program.used_opcodes & _SUMS) == (pieces != (1, 1) and config.pipeline.tp == 2)


def test_program_file_gives_segments(path: str) -> None:
    config = read_config(path, [write_segment_program(path, None)])
    assert config.segmentation == read_config(path, ["pipeline.stage_segments=layers"]).segmentation
    config = read_config(path, [write_segment_program(path, 9), "model.tied=false"])
    assert config.segmentation.first_segments == [0, 9, 18]
    assert build_program(config).frozen_stages == 9
    for sets, word, hint in (
        (
            ["model.layers=6"],
            "stage 0 has 3 layers, and needs the segment boundaries 'fgfgfgfgfgfg'",
            "layers = 4",
        ),
        (
            ["pipeline.layers_per_stage=1,3"],
            "stage 0 has 1 layer, and needs the segment boundaries 'fgfg'",
            "layers_per_stage = [...]",
        ),
        (["pipeline.stage_segments=9"], "stage_segments applies only to schedules and drafts", ""),
        (["model.kind=llama"], "kind 'llama' has no segments", 'kind = "gpt"'),
    ):
        with pytest.raises(ConfigError, match=word) as error:
            read_config(path, [write_segment_program(path, None), *sets])
        assert hint in error.value.hint
    with pytest.raises(ConfigError, match="the first 3 segments are not"):
        read_config(path, [write_segment_program(path, 3), "model.tied=false"])


def test_segment_file_without_tensor_parallelism(path: str) -> None:
    """A single rank has no sums between segments, so its draft is refused for two ranks."""
    alone = write_segment_program(path, None, tp=1)
    config = read_config(path, [alone, "pipeline.tp=1"])
    assert config.segmentation.segments_per_stage == (9, 9)
    assert not build_program(config).used_opcodes & _SUMS
    file = Path(path).with_name("x.sched")
    file.write_text(to_text(extract_compute(build_program(config))))
    assert build_program(read_config(path, [alone, "pipeline.tp=1"])).tp == 1
    with pytest.raises(ConfigError, match=r"the segment boundaries 'fgfgfgfg', not '\.{8}'"):
        read_config(path, [alone, "pipeline.tp=2"])


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (
            ["pipeline.stage_segments=5"],
            "stage 0 has 2 layers, and needs the segment boundaries 'fgfgfgfg', not",
        ),
        (
            ["pipeline.stage_segments=9,5"],
            "stage 1 has 2 layers, and needs the segment boundaries 'fgfgfgfg'",
        ),
        (["pipeline.stage_segments=9,9,9"], "3 entries, but the program has 2 stages"),
        (["pipeline.stage_segments=lines"], "not 'lines'"),
        (
            ["pipeline.stage_segments=9", "pipeline.layers_per_stage=1,3"],
            "stage 0 has 1 layer, and needs the segment boundaries 'fgfg'",
        ),
        (
            ["pipeline.stage_segments=layers", "pipeline.ranks=1"],
            "they cannot be in two segments of one stage",
        ),
        (["pipeline.stage_segments=layers", "model.kind=llama"], "kind 'llama' has no segments"),
        (
            ["pipeline.microbatch_chunks=3"],
            "microbatch_chunks = 3 does not divide microbatch_size = 4",
        ),
        (["pipeline.microbatch_chunks=0"], "at least 1"),
        (
            ["pipeline.fill_collective_waits=W", "pipeline.stage_segments=layers"],
            "fill_collective_waits needs costs",
        ),
    ],
)
def test_wrong_segment_settings_are_refused(path: str, sets: list[str], message: str) -> None:
    """The error is one sentence that names the setting. No process starts before it."""
    with pytest.raises(ConfigError, match=message) as error:
        read_config(path, sets)
    assert error.value.location == f"--set {sets[0]}" and "\n" not in error.value.fact
    # The hint gives an allowed value.
    if sets[0].startswith("pipeline.stage_segments=") and len(sets) == 1:
        assert error.value.hint == 'stage_segments = "layers"'


def test_default_has_one_segment_per_stage() -> None:
    example = Path(__file__).parents[2] / "examples" / "pieces.toml"
    assert read_config(str(example)).segmentation == StageSegmentation((2, 2), (9, 9), 2)
    assert Config().segmentation.segments_per_stage == (1,)
    assert Config().segmentation.layers_per_stage == (4,)
