"""What can be held without a GPU of the benchmark that needs one."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import gpu as benchmark
from benchmarks.gpu import Figure, layer_flop, main, of_gpt, of_ranks, peak, recorded, sleeping
from schedir import Costs, Plan, compile, simulate
from schedir.ir.sizes import Sizes
from schedir.runtime.executor import Executor
from schedir.runtime.inprocess import InProcess
from schedir.runtime.rank import Boundary
from schedir.schedules import one_f_one_b
from schedir.testing import tiny
from schedir.training import gpt
from tests.cpu.virtual_gpu import copies, install


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


def test_a_goal_that_is_no_number_is_missed() -> None:
    assert [Figure("", v, "us", 3.0).missed for v in (2.0, 3.0, 3.1, float("nan"))] == [
        False, False, True, True,
    ]  # fmt: skip
    assert not Figure("", float("nan"), "us").missed


def test_ranks_that_sleep_run_as_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the host, on streams and a clock of our own."""
    gpu = install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: gpu.work(cycles * 1e-6))
    boundary = Boundary((1, 2, 4))
    inputs = torch.randn(16, *boundary.shape)
    monkeypatch.setattr(benchmark, "DEVICE", "cpu")
    ranks = sleeping(16, boundary, 1000)  # a millisecond

    def step() -> None:
        gpu.host = gpu.over
        with copies(gpu, Costs(send=20e-6)):
            ranks.step(inputs, inputs)

    runs = recorded(ranks, step, 3)
    found = {figure.name.strip(): figure for figure in of_ranks("", runs, 3.0)}
    assert not any(figure.missed for figure in found.values())
    assert found[": gap, median"].value == pytest.approx(0, abs=1e-3)
    costs = Costs(F=1, B=2, send=0.02)
    predicted = simulate(ranks.program, costs, model="edge")
    assert found["step"].value == pytest.approx(predicted.span)
    assert found["step, predicted, off by"].value == pytest.approx(0, abs=1e-6)
    assert 0 < found["exposed transfers"].value < 2


def test_figures_of_a_gpt(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU would run and allocate, to the end: the figures themselves say nothing here."""
    gpu = install(monkeypatch)
    monkeypatch.setattr(benchmark, "DEVICE", "cpu")
    for name, given in (("memory_allocated", 100), ("max_memory_allocated", 2**20)):
        monkeypatch.setattr(torch.cuda, name, lambda given=given: given)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    config = gpt.GPTConfig(256, 4, 32, 2, 8, tied=False)
    call = Executor.call

    def slow(executor: Executor, k: int) -> None:
        gpu.work(1e-3)
        call(executor, k)

    monkeypatch.setattr(Executor, "call", slow)
    found = {figure.name.strip(): figure.value for figure in of_gpt(config, 4, 2)}
    assert list(found)[-2:] == ["peak memory", "peak memory, predicted, off by"]
    assert found["peak memory"] == pytest.approx((2**20 - 100) / 2**30)
    assert found["step"] > 1 and found["peak memory, predicted, off by"] > 0


def test_the_peak_of_ranks_together_is_in_the_order_of_issue() -> None:
    sizes = Sizes(activation=1.0, saved=10.0, weights=100.0)
    for ranks in (1, 3):
        program = compile(one_f_one_b, Plan(ranks, 6), model="edge", slots="fewest")
        world = InProcess(
            program,
            tiny.tiny_stages(ranks),
            loss=tiny.loss,
            boundary=Boundary((2, tiny.WIDTH), torch.float64),
        )
        each = simulate(program, sizes=sizes).peak_memory
        together = peak(world, sizes)
        assert each.max() <= together <= each.sum()
        # Ranks in turn come to hold all that they may: 3, 2 and 1 microbatches.
        assert together == each.sum()
