"""Tests that training runs with offload have the same losses, in less device memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from schedir.errors import ConfigError
from schedir.training.config.config_file import read_config
from tests.cpu.train_command import forked, losses, small

MANY = [
    "pipeline.schedule=gpipe", "pipeline.stages_per_rank=1", "pipeline.microbatches=48",
    "model.layers=2", "pipeline.buffer_sharing=minimal", "output.record=false",
    "output.memory=true",
]  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return small(tmp_path)


def test_what_only_offload_makes_fit(tmp_path: Path, config: Path) -> None:
    """Only a run with offload fits into the limit, and it has the same losses.

    Neither a plain run nor one with full recomputation fits. There are two processes with dropout,
    and some activations go to the disk.
    """
    disk = tmp_path / "disk"
    disk.mkdir()
    assert forked(str(config), tmp_path / "own", *MANY)[0] == 0
    limit = "memory.memory_limit=650kB"
    code, _, err = forked(str(config), tmp_path / "again", *MANY, limit, "memory.recompute=all")
    assert code == 2 and "MemoryLimitError" in err
    away = ["memory.offload=all", "memory.offload_to_disk=half", f"memory.spill_dir={disk}"]
    code, out, err = forked(str(config), tmp_path / "away", *MANY, limit, *away)
    assert code == 0, err
    (told,) = [line for line in out.splitlines() if "predicted memory of each rank" in line]
    assert "; on the host: " in told and "; on the disk: " in told
    assert losses(tmp_path / "away") == losses(tmp_path / "own") and not [*disk.iterdir()]
    own, found = (
        json.loads((tmp_path / name / "summary.json").read_text())["memory"]
        for name in ("own", "away")
    )
    assert min(own["predicted"]) > 650e3 >= max(found["predicted"])
    assert all(0 < counted <= 650e3 for counted in found["counted"])


def test_what_spills_wants_a_folder(config: Path) -> None:
    with pytest.raises(ConfigError, match=r"offload_to_disk = .* needs spill_dir"):
        read_config(str(config), ["memory.offload=all", "memory.offload_to_disk=all"])
