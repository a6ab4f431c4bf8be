"""Tests of hooks on the autograd nodes of weights.

Copies of a weight would not call such hooks, so programs with copies refuse them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook

from schedir import PipelineShape, compile
from schedir.errors import ModelError
from schedir.runtime import InProcessExecutor
from schedir.schedules import chimera, one_f_one_b, pipedream_2bw

WIDTH = 3
WITH_COPIES = [
    (pipedream_2bw, PipelineShape(2, 4, optimizer_steps=2, weight_delay=1)),
    (chimera, PipelineShape(2, 4, stages_per_rank=2, placement="mirror")),
]


def _do_nothing(*_: object) -> None: ...


class _NodeHook:
    def __init__(self, weight: Tensor) -> None:
        self.node = get_gradient_edge(
            weight
        ).node  # without a reference, torch would create a new node
        self.node.register_prehook(_do_nothing)


HOOKS: dict[str, Callable[[Tensor], object]] = {
    "node": _NodeHook,
    "all": lambda weight: register_multi_grad_hook([weight], _do_nothing),
    "any": lambda weight: register_multi_grad_hook([weight], _do_nothing, mode="any"),
}


def _make_ranks(schedule: Any, shape: PipelineShape, stages: list[nn.Linear]) -> InProcessExecutor:
    program = compile(schedule, shape)
    return InProcessExecutor(program, stages, loss=nn.functional.mse_loss, boundary=(2, WIDTH))


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("schedule", "shape"), WITH_COPIES)
@pytest.mark.parametrize("kind", HOOKS)
def test_node_hooks_are_refused_in_programs_with_weight_copies(
    kind: str, schedule: Any, shape: PipelineShape, late: bool
) -> None:
    stages = [nn.Linear(WIDTH, WIDTH) for _ in range(shape.stages)]
    ranks = _make_ranks(schedule, shape, stages) if late else None
    hook = HOOKS[kind](stages[1].weight)
    with pytest.raises(ModelError, match="weight of stage 1 has a hook on its autograd node"):
        (ranks or _make_ranks(schedule, shape, stages)).step(*torch.randn(2, 4, 2, WIDTH))
    del hook


@pytest.mark.parametrize("kind", HOOKS)
def test_node_hooks_are_accepted_without_weight_copies(kind: str) -> None:
    stages = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    hook = HOOKS[kind](stages[1].weight)
    _make_ranks(one_f_one_b, PipelineShape(2, 4), stages).step(*torch.randn(2, 4, 2, WIDTH))
    del hook
