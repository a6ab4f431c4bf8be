"""What is refused before a GPU is touched; all that a machine without one can tell."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from schedir import compile, train
from schedir.config import TrainConfig
from schedir.errors import ModelError, UsageError
from schedir.plan import Plan
from schedir.runtime.cuda import HOST, SHARED, refuse_twins, require_gpus
from schedir.runtime.graphs import GraphedStep
from schedir.runtime.inprocess import InProcess
from schedir.runtime.nccl import MODELS, nccl
from schedir.runtime.rank import Boundary
from schedir.runtime.tiny import loss, tiny_stages
from schedir.schedules import gpipe
from tests.gloo.spawn import run


@pytest.mark.parametrize(
    ("processes", "gpus", "environ", "about"),
    [
        (1, 0, {}, "GPU"),
        (2, 1, {}, "2 processes"),
        (1, 1, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "CUDA_DEVICE_MAX_CONNECTIONS"),
        (1, 1, {"TORCH_NCCL_BLOCKING_WAIT": "1"}, "TORCH_NCCL_BLOCKING_WAIT"),
        (1, 1, {"CUDA_LAUNCH_BLOCKING": "True"}, "CUDA_LAUNCH_BLOCKING"),
        (4, 1, {HOST: "a"}, "NCCL_P2P_DISABLE"),
        (4, 1, {HOST: "a", "NCCL_P2P_DISABLE": "1"}, "NCCL_SHM_DISABLE"),
    ],
)
def test_machines_that_are_refused(
    processes: int, gpus: int, environ: dict[str, str], about: str
) -> None:
    with pytest.raises(UsageError) as error:
        require_gpus(processes, gpus, environ)
    assert about in error.value.fact and error.value.hint


@pytest.mark.parametrize(
    ("processes", "gpus", "environ"),
    [
        (1, 1, {}),
        (8, 8, {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "TORCH_NCCL_BLOCKING_WAIT": "0"}),
        (4, 1, {HOST: "a", **SHARED}),
    ],
)
def test_machines_that_will_do(processes: int, gpus: int, environ: dict[str, str]) -> None:
    require_gpus(processes, gpus, environ)


def twins(rank: int, hosts: list[str]) -> str:
    try:
        refuse_twins("GPU-0", hosts[rank])
    except ModelError as error:
        return error.fact
    return ""


def test_processes_of_one_gpu_must_be_hosts_of_their_own() -> None:
    assert run(twins, 2, ["a", "b"]) == ["", ""]
    for fact in run(twins, 3, ["a", "b", "a"]):
        assert "processes 0 and 2" in fact


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_training_on_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    path.write_text('[train]\ndevice = "cuda"\n')
    folder = f"output.folder={tmp_path / 'out'}"
    for sets in ([folder], [folder, "pipeline.ranks=2", "pipeline.microbatches=2"]):
        with pytest.raises(UsageError) as error:
            train.run(str(path), sets)
        assert "cuda" in error.value.fact


@pytest.mark.parametrize(
    "wrong", [{"device": "tpu"}, {"precision": "float8"}, {"transport": "pair"}]
)
def test_unknown_devices_and_the_like(wrong: dict[str, str]) -> None:
    with pytest.raises(UsageError) as error:
        TrainConfig(**wrong)  # type: ignore[arg-type]
    assert next(iter(wrong)) in error.value.fact


def test_a_transport_names_its_model() -> None:
    assert MODELS == {"edge": "edge", "grouped": "device"}
    assert TrainConfig(device="cuda", transport="grouped").model == "device"
    assert TrainConfig().model == "edge"
    with pytest.raises(UsageError):
        TrainConfig(transport="grouped")  # of a CPU


def test_what_needs_a_gpu_says_so() -> None:
    program = compile(gpipe, Plan(1, 1))
    with pytest.raises(ModelError):
        nccl(program, torch.device("cpu"))
    world = InProcess(program, tiny_stages(1), loss=loss, boundary=Boundary((2, 4), torch.float64))
    with pytest.raises(ModelError):
        GraphedStep(world.ranks[0], [], [])
