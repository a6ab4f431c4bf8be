"""Tests that all model checks run before the first step in one order, and name the argument."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import nn

from schedir import PipelineShape, compile
from schedir.errors import ModelError
from schedir.runtime import Boundary, Executor, GradientOptions, InProcessExecutor
from schedir.runtime.model_checks.tied_weight_requirements import fingerprint_parameters
from schedir.runtime.parameters.mixed_precision import LossScale
from schedir.schedules import one_f_one_b

Given = dict[str, Any]


def _freeze(given: Given) -> None:
    given["options"]["frozen_stages"] = 1


def _move(given: Given) -> None:
    given["modules"][0].extra = nn.Parameter(torch.ones(1, device="meta"), requires_grad=False)


def _add_replicas(given: Given) -> None:
    given["transport"].dp = 2


def _stop_gradients(given: Given) -> None:
    given["boundary"] = Boundary((2, 3), requires_grad=False)


def _transpose(given: Given) -> None:
    weight = given["modules"][0].get_parameter("0.weight")
    weight.data = weight.data.t()


def _repeat_weight(given: Given) -> None:
    groups = given["optimizer"].param_groups
    groups.append({**groups[0], "params": [*groups[0]["params"]]})


def _place_whole_steps(given: Given) -> None:
    given["options"]["optimizer_placement"] = "host"
    given["optimizer"] = torch.optim.LBFGS(given["modules"][0].parameters())


def _scale_loss(given: Given) -> None:
    given["gradients"] = GradientOptions(loss_scale=LossScale())


def _copy_stage(given: Given) -> None:
    given["modules"][0].load_state_dict(given["modules"][1].state_dict(), strict=False)
    stages = dict(enumerate(given["modules"]))
    given["transport"].hub.payloads = [(0, fingerprint_parameters(stages))]


def _limit_rows(given: Given) -> None:
    given["modules"][0].append(nn.Embedding(4, 4, max_norm=1.0))


# Faults in the order of the checks, and the argument of Executor that the error names.
FAULTS: dict[str, tuple[Callable[[Given], None], str]] = {
    "trained parameters of a frozen stage": (_freeze, "stages"),
    "two devices": (_move, "stages"),
    "replicas of the transport only": (_add_replicas, "transport"),
    "a boundary without a gradient": (_stop_gradients, "boundary"),
    "a weight that is not contiguous": (_transpose, "stages"),
    "a weight that is stepped twice": (_repeat_weight, "optimizer"),
    "a loss scale without a norm": (_scale_loss, "gradients"),
    "equal stages": (_copy_stage, "tied_weights"),
    "an embedding that scales rows": (_limit_rows, "stages"),
}


def _refused(*faults: Callable[[Given], None]) -> ModelError:
    torch.manual_seed(0)
    shape = PipelineShape(2, 4)
    modules = [nn.Sequential(nn.Linear(3, 3)), nn.Sequential(nn.Linear(3, 3))]
    base = compile(one_f_one_b, shape)
    other = InProcessExecutor(base, deepcopy(modules), loss=_loss, boundary=(2, 3))
    given: Given = {
        "options": {"zero": 1}, "modules": modules, "boundary": (2, 3), "loss": _loss,
        "transport": other.mailboxes[0],
        "optimizer": torch.optim.SGD(modules[0].parameters(), lr=0.1),
    }  # fmt: skip
    for fault in faults:
        fault(given)
    program = compile(one_f_one_b, shape, **given.pop("options"))
    stages, transport = given.pop("modules"), given.pop("transport")
    with pytest.raises(ModelError) as refused:
        Executor(program, 0, stages, transport, **given)
    return refused.value


def _loss(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (y - target).square().sum()


@pytest.mark.parametrize("name", FAULTS)
def test_an_error_names_the_argument(name: str) -> None:
    fault, field = FAULTS[name]
    error = _refused(fault)
    assert error.fields == (field,) and error.program == "one_f_one_b"


@pytest.mark.parametrize(("first", "second"), [*combinations(FAULTS, 2)])
def test_the_first_of_two_faults_is_refused(first: str, second: str) -> None:
    faults = FAULTS[first][0], FAULTS[second][0]
    assert _refused(*faults).fact == _refused(faults[0]).fact


def test_an_optimizer_that_steps_all_stages_at_once_is_refused_before_it_moves() -> None:
    error = _refused(_place_whole_steps, _scale_loss, _limit_rows)
    assert error.fields == ("optimizer",)
