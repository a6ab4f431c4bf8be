"""Tests of inputs and results of a step under runtime="schedir"."""

from __future__ import annotations

import warnings
from copy import deepcopy
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from schedir.errors import UsageError
from schedir.torch_pipelining.schedule import Schedule
from tests.cpu.gloo_processes import run
from tests.cpu.tiny_stages import have_same_bits
from tests.cpu.torch_pipelines import make_stage

N, ROWS = 4, 8


def compare_kept_losses(rank: int) -> bool:
    """Return whether losses that are views of received tensors are unchanged by the next step."""
    torch.manual_seed(0)
    modules = [nn.Linear(4, 4), nn.Identity()]
    schedule = Schedule(
        [make_stage(modules[rank], rank, 2)], N, schedule="one_f_one_b", runtime="schedir",
        allow_identical_stages=True,
        loss_fn=lambda y, _: y.flatten()[0],
    )  # fmt: skip
    all_losses: list[list[Tensor]] = []
    copies: list[list[Tensor]] = []
    for seed in range(2):
        torch.manual_seed(seed)
        x, losses = torch.randn(ROWS, 4), list[Tensor]()
        schedule.eval(*((x,) if rank == 0 else ()), target=x, losses=losses)
        all_losses.append(losses)
        copies.append([loss.clone() for loss in losses])
    return have_same_bits(all_losses, copies) and (rank == 0 or not have_same_bits(*all_losses))


def test_losses_are_unchanged_by_next_step() -> None:
    assert all(run(compare_kept_losses, 2))


def collect_split_warnings(rank: int) -> list[str]:
    """Return the warnings that compiled stages run a full backward, and compare gradients."""
    torch.manual_seed(0)
    plain = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)]
    module = deepcopy(plain[rank])
    stage = make_stage(cast(nn.Module, torch.compile(module, backend="aot_eager")), rank, 2)
    schedule = Schedule(
        [stage], N, loss_fn=mse_loss, schedule="zb_h1", runtime="schedir",
        allow_identical_stages=True,
    )  # fmt: skip
    x, y = torch.randn(ROWS, 4), torch.randn(ROWS, 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            schedule.step(*((x,) if rank == 0 else ()), target=y)
    for _ in range(2):
        for mb_x, mb_y in zip(x.chunk(N), y.chunk(N), strict=True):
            (mse_loss(plain[1](plain[0](mb_x)), mb_y) / N).backward()
    for p, q in zip(module.parameters(), plain[rank].parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    return [str(warning.message) for warning in caught if "is not split" in str(warning.message)]


def test_compiled_stages_run_full_backward_with_warning() -> None:
    for split_warnings in run(collect_split_warnings, 2):
        assert len(split_warnings) == 1


WRONG_INPUTS: list[dict[str, Any]] = [
    {"losses": ()},
    {"target_mbs": None},
    {"target_mbs": [torch.ones(1)]},
    {"target_mbs": 5},
    {"arg_mbs": [torch.ones(1)] * N},
    {"kwarg_mbs": [5] * N},
    {"kwarg_mbs": ({},) * N},
]


def collect_errors(rank: int) -> list[str]:
    """Return the errors of wrong inputs of the last rank."""
    torch.manual_seed(rank)
    stage = make_stage(nn.Linear(4, 4), rank, 2)
    schedule = Schedule([stage], N, loss_fn=mse_loss, schedule="one_f_one_b", runtime="schedir")
    rows = [torch.ones(2, 4) for _ in range(N)]
    right_inputs: dict[str, Any] = (
        {"target_mbs": rows} if rank else {"arg_mbs": [(x,) for x in rows]}
    )
    errors = []
    for inputs in WRONG_INPUTS:
        try:
            schedule.step(**right_inputs | (inputs if rank else {}))
        except UsageError as error:
            errors.append(error.fact)
    schedule.step(**right_inputs)
    return errors


def test_wrong_input_on_one_rank_is_error_on_all_ranks() -> None:
    first, second = run(collect_errors, 2, limit=40)
    assert first == second
    assert len(first) == len(WRONG_INPUTS)
