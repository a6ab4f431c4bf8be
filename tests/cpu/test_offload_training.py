"""Tests that training runs with offload have the same losses, in less device memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from schedir.errors import ConfigError
from schedir.training.config.config_file import read_config
from tests.cpu.train_command import read_losses, run_forked, write_small_config

MANY_MICROBATCHES = [
    "pipeline.schedule=gpipe", "pipeline.stages_per_rank=1", "pipeline.microbatches=36",
    "model.layers=2", "pipeline.buffer_sharing=minimal", "output.record=false",
    "output.memory=true",
]  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_small_config(tmp_path)


def test_memory_limit_is_met_only_with_offload(tmp_path: Path, config: Path) -> None:
    """A plain run and a run with full recomputation exceed the limit.

    The losses are equal. There are two processes with dropout, and some activations go to the disk.
    """
    disk = tmp_path / "disk"
    disk.mkdir()

    def train(name: str, *settings: str) -> tuple[int, str, str]:
        return run_forked(str(config), tmp_path / name, *MANY_MICROBATCHES, *settings)

    assert train("own")[0] == 0
    limit = "memory.memory_limit=610kB"
    code, _, err = train("again", limit, "memory.recompute=all")
    assert code == 2 and "MemoryLimitError" in err
    offload = ["memory.offload=all", "memory.offload_to_disk=half", f"memory.spill_dir={disk}"]
    code, out, err = train("away", limit, *offload)
    assert code == 0, err
    (memory_line,) = [line for line in out.splitlines() if "predicted memory of each rank" in line]
    assert "; on the host: " in memory_line and "; on the disk: " in memory_line
    assert read_losses(tmp_path / "away") == read_losses(tmp_path / "own") and not [*disk.iterdir()]
    plain, offloaded = (
        json.loads((tmp_path / name / "summary.json").read_text())["memory"]
        for name in ("own", "away")
    )
    assert min(plain["predicted"]) > 610e3 >= max(offloaded["predicted"])
    assert all(0 < counted <= 610e3 for counted in offloaded["counted"])


def test_offload_to_disk_needs_spill_dir(config: Path) -> None:
    with pytest.raises(ConfigError, match=r"offload_to_disk = .* needs spill_dir"):
        read_config(str(config), ["memory.offload=all", "memory.offload_to_disk=all"])
