"""Tests that an error names its setting in `fields`, so that no code searches its message."""

from __future__ import annotations

import ast
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

from schedir.errors import ConfigError, ParseError, SchedirError, ShapeError
from schedir.ir.input_trust import input_limits
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import HEADER_FIELDS, Program
from schedir.ir.text_format import from_text
from schedir.training.config.config_file import read_config
from schedir.training.config.run_config import Config, MemoryConfig, PipelineConfig

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("shape", "blamed"),
    [
        ({"ranks": 0}, ["ranks"]),
        ({"microbatches": 1.5}, ["microbatches"]),
        ({"stages_per_rank": True}, ["stages_per_rank"]),
        ({"ranks": 2**15, "stages_per_rank": 2}, ["ranks", "stages_per_rank", "placement"]),
        ({"placement": "zigzag"}, ["placement"]),
        ({"placement": 3}, ["placement"]),
        ({"placement": (0, 2)}, ["placement", "ranks"]),
        ({"placement": (0, 0)}, ["placement", "ranks"]),
        ({"placement": (0, 1), "stages_per_rank": 3}, ["placement", "stages_per_rank"]),
        ({"placement": "mirror", "ranks": 3}, ["placement", "ranks"]),
        ({"placement": "mirror", "microbatches": 1}, ["placement", "microbatches"]),
        ({"placement": "mirror", "optimizer_steps": 2}, ["placement", "optimizer_steps"]),
        ({"placement": (0, 1, -1)}, ["placement", "ranks"]),
        ({"placement": (0, "x")}, ["placement"]),
        ({"placement": ()}, ["placement"]),
        ({"optimizer_steps": 3}, ["microbatches", "optimizer_steps"]),
        ({"optimizer_steps": 0}, ["optimizer_steps"]),
        ({"optimizer_steps": True}, ["optimizer_steps"]),
        ({"optimizer_steps": 2, "weight_delay": 1.5}, ["weight_delay"]),
        ({"optimizer_steps": 2, "weight_delay": ("a", 0)}, ["weight_delay"]),
        ({"optimizer_steps": 2, "weight_delay": "x"}, ["weight_delay"]),
        ({"optimizer_steps": 2, "weight_delay": -1}, ["weight_delay"]),
        ({"optimizer_steps": 2, "weight_delay": (1, 2, 3)}, ["weight_delay"]),
        ({"weight_delay": 1}, ["weight_delay", "optimizer_steps"]),
        ({"sequence_chunks": 0}, ["sequence_chunks"]),
        ({"sequence_chunks": 3}, ["sequence_chunks", "microbatches"]),
        ({"sequence_chunks": 8, "optimizer_steps": 2}, ["sequence_chunks", "microbatches"]),
        ({"sequence_chunks": 8, "placement": "mirror"}, ["sequence_chunks", "microbatches"]),
    ],
)
def test_invalid_pipeline_shape_error_has_fields(shape: dict[str, Any], blamed: list[str]) -> None:
    with pytest.raises(ShapeError) as caught:
        PipelineShape(**{"ranks": 2, "microbatches": 8} | shape)
    assert [*caught.value.fields][: len(blamed)] == blamed


def test_too_large_pipeline_shape_error_has_fields() -> None:
    with input_limits(max_instructions=10**8), pytest.raises(ShapeError) as caught:
        PipelineShape(ranks=2**10, microbatches=2**20)
    assert [*caught.value.fields][:2] == ["microbatches", "ranks"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"tp": 0}, {"dp": "2"}, {"tied_weights": 3}, {"tied_weights": ((0, 9),)},
        {"tied_weights": ((1,),)}, {"clip_grad_norm": 2}, {"skips": ((0, 1),)}, {"slots": 3},
        {"slots": [(1, 1, 1, 1)]}, {"name": "a#b"}, {"name": " x"},
    ],
)  # fmt: skip
def test_invalid_program_error_has_fields(wrong: dict[str, Any]) -> None:
    with pytest.raises(SchedirError) as caught:
        Program(**{"name": "x", "shape": PipelineShape(2, 4), "streams": ()} | wrong)  # type: ignore[arg-type]
    assert caught.value.fields == (*wrong,)


@pytest.mark.parametrize(
    ("sets", "location", "field"),
    [
        (["pipeline.ranks=3"], "--set pipeline.ranks=3", "ranks"),  # not in its message
        (["pipeline.ranks=2", "model.layers=5"], "--set model.layers=5", "layers"),
        (["pipeline.ranks=8"], "--set pipeline.ranks=8", "ranks"),
        (["model.heads=3"], "--set model.heads=3", "heads"),
        (["model.heads=2", "pipeline.tp=3"], "--set pipeline.tp=3", "tp"),
        (["train.lr=1e-5"], "--set train.lr=1e-5", "lr"),
        (["train.precision=float16", "train.clip_grad_norm=0"], "--set train.clip_grad_norm=0",
         "clip_grad_norm"),
        (["train.device=cuda", "train.transport=gloo"], "--set train.transport=gloo", "transport"),
        (["output.trace=x", "output.record=false"], "--set output.trace=x", "trace"),
        (["pipeline.buffer_sharing=few"], "--set pipeline.buffer_sharing=few", "buffer_sharing"),
        (["pipeline.ranks=2", "pipeline.placement=0,2"], "--set pipeline.placement=0,2",
         "placement"),
        (["pipeline.ranks=3", "pipeline.schedule=dualpipe", "model.layers=6"],
         "--set pipeline.ranks=3", "ranks"),
    ],
)  # fmt: skip
def test_config_error_has_location_and_field(
    tmp_path: Path, sets: list[str], location: str, field: str
) -> None:
    (tmp_path / "run.toml").write_text("")
    with pytest.raises(ConfigError) as caught:
        read_config(str(tmp_path / "run.toml"), sets)
    assert caught.value.location == location and field in caught.value.fields


def test_field_name_in_value_does_not_set_error_position() -> None:
    """The value of `placement` here equals the name of another field, `dp`."""
    text = "schedir 1\nprogram x\ndp 1\nranks 2  microbatches 2  placement dp\nrank 0\nrank 1\n"
    with pytest.raises(ParseError) as caught:
        from_text(text)
    assert (caught.value.line, caught.value.column) == (4, 36)


def test_setting_errors_pass_fields() -> None:
    for path in (
        "ir/pipeline/pipeline_shape",
        "ir/program",
        "training/config/run_config",
        "models/gpt_config",
    ):
        for node in ast.walk(ast.parse((ROOT / "schedir" / f"{path}.py").read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "ShapeError",
                "UsageError",
            ):
                assert "fields" in [word.arg for word in node.keywords], ast.unparse(node)


def test_config_and_program_header_have_same_defaults() -> None:
    """Only `ranks` and `microbatches` have other defaults in a configuration."""
    config_fields = {f.name: f for kind in (PipelineConfig, MemoryConfig) for f in fields(kind)}
    different_defaults = [
        f.name for f in HEADER_FIELDS if f.in_config and config_fields[f.name].default != f.default
    ]
    assert different_defaults == ["ranks", "microbatches"]
    assert [f.name for f in HEADER_FIELDS if f.default is MISSING] == different_defaults
    program = Config().request.program
    program_only = {"tied_weights", "clip_grad_norm", "skips", "sequence_chunks"}
    program_only |= {"checkpoint_snapshots", "norm_check"}
    program_only |= {"segment_boundaries", "chunks_per_microbatch"}
    assert {f.name for f in HEADER_FIELDS if not f.in_config} == program_only
    assert (program.tied_weights, program.clip_grad_norm) == (
        (),
        True,
    )  # a single stage has no tie
