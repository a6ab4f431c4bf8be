"""Tests that all model checks run in one order before the first step, and name the argument."""

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
from tests.cpu.stage_chains import squared_error

Arguments = dict[str, Any]


def _transpose(arguments: Arguments) -> None:
    weight = arguments["modules"][0].get_parameter("0.weight")
    weight.data = weight.data.t()


def _repeat_weight(arguments: Arguments) -> None:
    groups = arguments["optimizer"].param_groups
    groups.append({**groups[0], "params": [*groups[0]["params"]]})


def _place_whole_steps(arguments: Arguments) -> None:
    arguments["options"]["optimizer_placement"] = "host"
    arguments["optimizer"] = torch.optim.LBFGS(arguments["modules"][0].parameters())


def _scale_loss(arguments: Arguments) -> None:
    arguments["gradients"] = GradientOptions(loss_scale=LossScale())


def _copy_stage(arguments: Arguments) -> None:
    arguments["modules"][0].load_state_dict(arguments["modules"][1].state_dict(), strict=False)
    stages = dict(enumerate(arguments["modules"]))
    arguments["transport"].hub.payloads = [(0, fingerprint_parameters(stages))]


def _limit_rows(arguments: Arguments) -> None:
    arguments["modules"][0].append(nn.Embedding(4, 4, max_norm=1.0))


META = nn.Parameter(torch.ones(1, device="meta"), requires_grad=False)
WITHOUT_GRADIENT = Boundary((2, 3), requires_grad=False)
# Faults in the order of the checks, and the argument of Executor that the error names.
FAULTS: dict[str, tuple[Callable[[Arguments], None], str]] = {
    "trained parameters of a frozen stage": (
        lambda a: a["options"].update(frozen_stages=1),
        "stages",
    ),
    "two devices": (lambda a: a["modules"][0].register_parameter("extra", META), "stages"),
    "replicas of the transport only": (lambda a: setattr(a["transport"], "dp", 2), "transport"),
    "a boundary without a gradient": (lambda a: a.update(boundary=WITHOUT_GRADIENT), "boundary"),
    "a weight that is not contiguous": (_transpose, "stages"),
    "a weight that is stepped twice": (_repeat_weight, "optimizer"),
    "a loss scale without a norm": (_scale_loss, "gradients"),
    "equal stages": (_copy_stage, "tied_weights"),
    "an embedding that scales rows": (_limit_rows, "stages"),
}


def _read_refusal(*faults: Callable[[Arguments], None]) -> ModelError:
    torch.manual_seed(0)
    shape = PipelineShape(2, 4)
    modules = [nn.Sequential(nn.Linear(3, 3)), nn.Sequential(nn.Linear(3, 3))]
    base = compile(one_f_one_b, shape)
    ranks = InProcessExecutor(base, deepcopy(modules), loss=squared_error, boundary=(2, 3))
    arguments: Arguments = {
        "options": {"zero": 1}, "modules": modules, "boundary": (2, 3), "loss": squared_error,
        "transport": ranks.mailboxes[0],
        "optimizer": torch.optim.SGD(modules[0].parameters(), lr=0.1),
    }  # fmt: skip
    for fault in faults:
        fault(arguments)
    program = compile(one_f_one_b, shape, **arguments.pop("options"))
    stages, transport = arguments.pop("modules"), arguments.pop("transport")
    with pytest.raises(ModelError) as caught:
        Executor(program, 0, stages, transport, **arguments)
    return caught.value


@pytest.mark.parametrize("name", FAULTS)
def test_error_names_argument(name: str) -> None:
    fault, field = FAULTS[name]
    error = _read_refusal(fault)
    assert error.fields == (field,) and error.program == "one_f_one_b"


@pytest.mark.parametrize(("first", "second"), [*combinations(FAULTS, 2)])
def test_first_of_two_faults_is_reported(first: str, second: str) -> None:
    faults = FAULTS[first][0], FAULTS[second][0]
    assert _read_refusal(*faults).fact == _read_refusal(faults[0]).fact


def test_lbfgs_with_optimizer_offload_is_refused() -> None:
    error = _read_refusal(_place_whole_steps, _scale_loss, _limit_rows)
    assert error.fields == ("optimizer",)
