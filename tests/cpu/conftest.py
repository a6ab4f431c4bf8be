from pathlib import Path

import pytest
import torch

from tests.cpu.training import CONFIG

# Bits are compared between processes: each has the same one thread.
torch.set_num_threads(1)


@pytest.fixture
def config(tmp_path: Path) -> str:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog " * 40)
    path = tmp_path / "run.toml"
    path.write_text(CONFIG.format(text=text))
    return str(path)
