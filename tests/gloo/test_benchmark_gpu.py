"""What can be held without a GPU of the benchmark that needs one."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu import layer_flop, main
from schedir import gpt


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_it_refuses_a_machine_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["gpu.py"])
    assert main() == 2
    out, err = capsys.readouterr()
    assert out == "" and "needs a GPU" in err


def test_the_products_of_a_layer() -> None:
    stage = gpt.build_stage(gpt.GPTConfig(256, 3, 64, 2, 32), 1, 3)
    # The fused attention of a CPU is not counted.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        stage(torch.randn(1, 32, 64))
    assert counter.get_total_flops() == layer_flop(64, 32)
