"""Tests of microbatches of different lengths in `schedir.torch_pipelining`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schedir.errors import ModelError
from schedir.runtime.sequential_reference import run_sequential
from schedir.torch_pipelining.executor_factory import collect_requirements, collect_shapes
from schedir.torch_pipelining.schedule import Schedule
from schedir.torch_pipelining.stages import require_declared_output
from tests.cpu.gloo_processes import run
from tests.cpu.multi_tensor_stages import copy_gradients, have_same_bits, squared_error
from tests.cpu.torch_pipelines import make_stage

WIDTH, N, STAGES = 4, 4, 4
STEPS = [(3, 5, 1, 4), (3, 3, 3, 3), (5, 4, 1, 3), (2, 5, 1, 4)]  # lengths of microbatches


class MaskedLayer(nn.Module):
    """Passes numbers and a mask, and multiplies them by the scales of a microbatch."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.is_last = number == STAGES - 1
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor, *, scales: Tensor) -> Any:
        y = torch.tanh(self.linear(x)) * scales + x.cumsum(1) * mask[..., None]
        return y if self.is_last else (y, mask)


def make_microbatches(lengths: tuple[int, ...]) -> tuple[list[Any], list[Tensor], list[Any]]:
    """Return the inputs, targets and keywords of microbatches with these numbers of tokens."""
    torch.manual_seed(sum(lengths))
    inputs = [(torch.randn(2, n, WIDTH), torch.rand(2, n) > 0.5) for n in lengths]
    targets = [torch.randn(2, n, WIDTH) for n in lengths]
    return inputs, targets, [{"scales": torch.rand(n, 1)} for n in lengths]


def make_schedule(rank: int, schedule: str, **options: Any) -> tuple[Schedule, dict[int, Any]]:
    """Return a Schedule, and the modules of the rank."""
    own = (rank, STAGES - 1 - rank) if schedule == "zb_v" else (rank, rank + 2)
    modules = {s: MaskedLayer(s) for s in own}
    stages = [make_stage(module, s, STAGES) for s, module in modules.items()]
    options = {"loss_fn": squared_error, "scale_grads": False, **options}
    return Schedule(stages, N, schedule=schedule, **options), modules


def step(schedule: Schedule, lengths: tuple[int, ...], **options: Any) -> Any:
    """Run a step with the arguments that this rank needs."""
    inputs, targets, keywords = make_microbatches(lengths)
    return schedule.step(
        arg_mbs=inputs if any(s.is_first for s in schedule._stages) else None,
        target_mbs=targets if any(s.is_last for s in schedule._stages) else None,
        kwarg_mbs=keywords,
        **options,
    )


Results = list[tuple[Any, list[Tensor], dict[int, Any]]]


def run_steps(rank: int, name: str) -> Results:
    """Return the outputs, losses and gradients of each step, by stage."""
    schedule, modules = make_schedule(rank, name, runtime="schedir")
    results: Results = []
    for lengths in STEPS:
        for module in modules.values():
            module.zero_grad()
        losses: list[Tensor] = []
        output = step(schedule, lengths, losses=losses)
        gradients = dict(zip(modules, copy_gradients([*modules.values()]), strict=True))
        results.append((output, losses, gradients))
    return results


def test_lengths_that_vary_have_reference_bits() -> None:
    """The reference is the sequential run of the executor's stages."""
    for name in ("interleaved", "zb_v"):
        ranks: list[Results] = run(run_steps, 2, name)
        for k, lengths in enumerate(STEPS):
            inputs, targets, keywords = make_microbatches(lengths)
            stages = [MaskedLayer(s) for s in range(STAGES)]
            total = run_sequential(stages, inputs, targets, loss=squared_error, keywords=keywords)
            found = ranks[0][k][2] | ranks[1][k][2]
            assert have_same_bits([found[s] for s in range(STAGES)], copy_gradients([*stages]))
            (losses,) = (one[k][1] for one in ranks if one[k][1])
            assert torch.equal(sum(losses, torch.zeros(())), total)
            (output,) = (one[k][0] for one in ranks if one[k][0] is not None)
            if len({*lengths}) == 1:
                assert output.shape == (2 * N, lengths[0], WIDTH)
            else:
                assert [tuple(each.shape) for each in output] == [(2, n, WIDTH) for n in lengths]


def count_forwards(rank: int) -> list[int]:
    """Return the number of forwards of a stage in each step."""
    schedule, modules = make_schedule(rank, "interleaved", runtime="schedir")
    counts = [0] * len(STEPS)
    for k, lengths in enumerate(STEPS):

        def count(*_: Any, k: int = k) -> None:
            counts[k] += 1

        hook = modules[rank].register_forward_pre_hook(count)
        step(schedule, lengths)
        hook.remove()
    return counts


def test_only_new_lengths_need_another_forward() -> None:
    for counts in run(count_forwards, 2):
        assert counts == [N + 4, N, N, N + 1]


def test_torch_runtime_refuses_other_lengths_with_hint() -> None:
    meta = SimpleNamespace(outputs=[torch.empty(2, 3, WIDTH)])
    stage = SimpleNamespace(stage_index=0, has_backward=True, _stage_meta=meta)
    require_declared_output(stage, torch.empty(2, 3, WIDTH), is_sent=True)
    with pytest.raises(ModelError) as caught:
        require_declared_output(stage, torch.empty(2, 5, WIDTH), is_sent=True)
    assert caught.value.fields == ("runtime",)
    assert "runtime='schedir'" in caught.value.hint


def test_requirements_depend_on_nested_shapes_and_on_names() -> None:
    assert collect_shapes([([torch.zeros(2)],)]) != collect_shapes([([torch.zeros(3)],)])
    assert collect_shapes({"a": {1: torch.zeros(2)}}) != collect_shapes({"a": {1: torch.zeros(3)}})
    module = nn.Sequential(nn.Linear(2, 2))
    stage = SimpleNamespace(submod=module, device="cpu", stage_index=0)
    first = collect_requirements([stage], True, ((), ()), 0)
    module[0] = nn.Sequential(module[0])  # the same parameters, with other names
    assert collect_requirements([stage], True, ((), ()), 0) != first
