"""Tests of the checks before a GPU is used. They need no GPU."""

from __future__ import annotations

import inspect
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from schedir import compile, to_text
from schedir.errors import DeadlockError, ModelError, UsageError
from schedir.io.terminal_output import format_error
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.models import gpt_config
from schedir.schedules import gpipe
from schedir.training import train
from schedir.training.config import run_config
from schedir.training.config.train_config import TrainConfig
from schedir.transports import process_groups
from schedir.transports.gloo import GlooTransport
from schedir.transports.gpu_selection import (
    HOST_ID_VARIABLE,
    SHARED_GPU_VARIABLES,
    require_distinct_gpus,
    require_gpus,
)
from schedir.transports.nccl import (
    NCCLEdge,
    NCCLGrouped,
    join_rendezvous,
    nccl_transport,
    set_default_variables,
)
from schedir.transports.p2p_groups import EdgeGroups, GroupedMessages
from schedir.transports.process_transport import ProcessTransport
from schedir.transports.registry import (
    DEVICES,
    TRANSPORTS,
    TransportRow,
    choose_transport,
    list_transports,
    load_object,
)
from schedir.transports.shared_memory import SharedMemoryTransport
from tests.pure.test_blocking_hosts import sends

GOLDEN = Path(__file__).parents[1] / "golden"


REFUSED: list[tuple[int, int, dict[str, str]]] = [
    (1, 0, {}),
    (2, 1, {}),
    (4, 2, {"CUDA_VISIBLE_DEVICES": "0,1"}),
    (1, 1, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
    (1, 1, {"TORCH_NCCL_BLOCKING_WAIT": "1"}),
    (1, 1, {"CUDA_DEVICE_MAX_CONNECTIONS": "4"}),
    (1, 1, {"CUDA_LAUNCH_BLOCKING": "True"}),
    (1, 1, {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}),
    (1, 1, {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}),
    (1, 1, {"NCCL_COMM_SPLIT_SHARE_RESOURCES": "1"}),
    (1, 1, {"NCCL_MIN_CTAS": "32"}),
    (1, 1, {"NCCL_MAX_CTAS": "32"}),
    (1, 1, {"NCCL_MIN_P2P_NCHANNELS": "32"}),
    (1, 1, {"NCCL_NCHANNELS_PER_NET_PEER": "32"}),
    (1, 1, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "0"}),
    (4, 1, {HOST_ID_VARIABLE: "a"}),
    (4, 1, {HOST_ID_VARIABLE: "a", "NCCL_P2P_DISABLE": "1"}),
]


def test_unsuitable_machines_are_refused() -> None:
    errors = []
    for processes, gpus, environ in REFUSED:
        with pytest.raises(UsageError) as error:
            require_gpus(processes, gpus, environ)
        assert error.value.hint
        errors.append(format_error(error.value))
    assert "on a machine without a GPU, use the device 'cpu'" in errors[0]
    # Other tests cover a torch without CUDA.
    assert "\n".join(errors[1:]) + "\n" == (GOLDEN / "machines.txt").read_text()


@pytest.mark.parametrize(
    ("processes", "gpus", "environ"),
    [
        (1, 1, {}),
        (8, 1, {"CUDA_VISIBLE_DEVICES": "3"}),
        (8, 8, {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "TORCH_NCCL_BLOCKING_WAIT": "0"}),
        (8, 8, {"TORCH_DISTRIBUTED_DEBUG": "INFO", "NCCL_LAUNCH_ORDER_IMPLICIT": "0"}),
        (8, 8, {"NCCL_COMM_SPLIT_SHARE_RESOURCES": "0", "NCCL_MAX_CTAS": "2"}),
        (4, 1, {HOST_ID_VARIABLE: "a", **SHARED_GPU_VARIABLES}),
    ],
)
def test_suitable_machines_are_accepted(processes: int, gpus: int, environ: dict[str, str]) -> None:
    require_gpus(processes, gpus, environ)


def test_nccl_conf_file_counts_as_environment_variables(tmp_path: Path) -> None:
    file = tmp_path / ".nccl.conf"
    file.write_text("# NCCL_MIN_CTAS=32\nNCCL_DEBUG=WARN\nNCCL_COMM_SPLIT_SHARE_RESOURCES = 1\n")
    home = {"HOME": str(tmp_path)}
    for environ in (home, {"NCCL_CONF_FILE": str(file)}):
        with pytest.raises(UsageError) as error:
            require_gpus(1, 1, environ)
        assert "NCCL_COMM_SPLIT_SHARE_RESOURCES is 1" in error.value.fact
    require_gpus(1, 1, home | {"NCCL_COMM_SPLIT_SHARE_RESOURCES": "0"})


def test_default_variables_do_not_replace_set_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"PYTORCH_CUDA_ALLOC_CONF": "backend:native", "CUDA_DEVICE_MAX_CONNECTIONS": "16"}
    set_default_variables(environ)
    assert environ["PYTORCH_CUDA_ALLOC_CONF"] == "backend:native"
    assert "PYTORCH_ALLOC_CONF" not in environ
    assert environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "16"
    assert environ["TORCH_FR_BUFFER_SIZE"] == "2000"
    set_default_variables(default_environ := {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0"})
    assert default_environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert "TORCH_FR_BUFFER_SIZE" not in default_environ


def check_gpu_of_process(store: Path, hosts: list[str], process: int) -> str:
    file_store = dist.FileStore(str(store), len(hosts))  # type: ignore[attr-defined]
    try:
        require_distinct_gpus(file_store, process, len(hosts), "GPU-0", hosts[process])
    except ModelError as error:
        return error.fact
    return ""


def test_processes_on_one_gpu_need_different_host_ids(tmp_path: Path) -> None:
    def check_all_processes(store_name: str, hosts: list[str]) -> list[str]:
        check = partial(check_gpu_of_process, tmp_path / store_name, hosts)
        with ThreadPoolExecutor(len(hosts)) as pool:
            return [*pool.map(check, range(len(hosts)))]

    assert check_all_processes("two", ["a", "b"]) == ["", ""]
    for fact in check_all_processes("three", ["a", "b", "a"]):
        assert "processes 0 and 2" in fact and "GPU-0" in fact


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_training_on_missing_gpu_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    path.write_text('[train]\ndevice = "cuda"\n')
    folder = f"output.dir={tmp_path / 'out'}"
    for sets in ([folder], [folder, "pipeline.ranks=2", "pipeline.microbatches=2"]):
        with pytest.raises(UsageError) as error:
            train.run(str(path), sets)
        assert "cuda" in error.value.fact


@pytest.mark.parametrize(
    "wrong", [{"device": "tpu"}, {"precision": "float8"}, {"transport": "pair"}]
)
def test_unknown_device_precision_and_transport_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(UsageError) as error:
        TrainConfig(**wrong)  # type: ignore[arg-type]
    assert next(iter(wrong)) in error.value.fact


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_deadlock_of_blocking_hosts_is_refused_on_every_device(
    device: Literal["cpu", "cuda"], tmp_path: Path
) -> None:
    """`per_edge` allows the order of the late send. Blocking hosts and torch over NCCL do not."""
    assert EdgeGroups.blocking_hosts and GroupedMessages.blocking_hosts
    path = tmp_path / "late.sched"
    path.write_text(to_text(sends(late=False)))
    run = run_config.Config(
        gpt_config.GPTConfig(tied=False),
        run_config.PipelineConfig(schedule=str(path), ranks=2, microbatches=2),
        train=TrainConfig(device=device, clip_grad_norm=0.0),
    )
    train.build_program(run)
    path.write_text(to_text(sends(late=True)))
    with pytest.raises(DeadlockError):
        train.build_program(run)


def test_transport_sets_progress_model() -> None:
    assert TrainConfig(device="cuda", transport="nccl_grouped").progress_model == "per_device"
    assert TrainConfig().progress_model == "per_edge"
    with pytest.raises(UsageError):
        TrainConfig(transport="nccl_grouped")  # the device is a CPU


@pytest.mark.parametrize("row", TRANSPORTS.values(), ids=lambda row: row.name)
def test_transport_row_matches_its_class(row: TransportRow) -> None:
    transport_class = load_object(row.class_path)
    assert issubclass(transport_class, ProcessTransport)
    assert transport_class.progress_model == row.progress_model
    assert transport_class.blocking_hosts == row.blocking_hosts
    parameters = inspect.signature(transport_class).parameters
    positional, keyword_only = [*parameters.values()][:4], [*parameters.values()][4:]
    assert [p.name for p in positional] == ["program", "timeout", "device", "max_message_bytes"]
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in [*positional[2:], *keyword_only])
    assert all(
        p.default is not inspect.Parameter.empty for p in keyword_only
    )  # the row's constructor needs no other arguments
    assert row.device in DEVICES
    for function in (DEVICES[row.device].require_path, DEVICES[row.device].initialise_path):
        assert callable(load_object(function))


def test_choose_transport_returns_class() -> None:
    plain = compile(gpipe, PipelineShape(2, 2))
    shared_buffers = compile(gpipe, PipelineShape(2, 2), buffer_sharing="minimal")
    assert choose_transport("auto", "cpu", shared_buffers) is GlooTransport
    assert (
        choose_transport("shared_memory", "cpu", shared_buffers) is SharedMemoryTransport
    )  # its constructor refuses the program with a reason
    assert choose_transport("gloo", "cpu", plain) is GlooTransport
    assert choose_transport("auto", "cuda", plain) is NCCLEdge
    assert choose_transport("nccl_grouped", "cuda", plain) is NCCLGrouped
    models = {row.progress_model for row in list_transports("cuda")}
    assert models == {"per_edge"}  # the model that "auto" compiles for


def test_nccl_transport_needs_gpu() -> None:
    program = compile(gpipe, PipelineShape(1, 1))
    with pytest.raises(ModelError):
        nccl_transport(program, torch.device("cpu"))


def test_join_rendezvous_returns_store_and_rank(tmp_path: Path) -> None:
    arguments = join_rendezvous(
        5.0, init_method=(tmp_path / "store").as_uri(), rank=0, world_size=1
    )
    assert (arguments.pop("rank"), arguments.pop("world_size")) == (0, 1)
    store = arguments.pop("store")
    store.set("key", "value")
    assert store.get("key") == b"value" and not arguments
    from_store = join_rendezvous(5.0, store=store, rank=2, world_size=3)
    assert from_store == {"store": store, "rank": 2, "world_size": 3}


class Options:
    """A stand-in for ProcessGroupNCCL.Options, for a torch without NCCL."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream, self._timeout = is_high_priority_stream, timedelta(minutes=10)
        self.config = SimpleNamespace(split_share=None, min_ctas=None, max_ctas=None)


@pytest.fixture
def group_options(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return the list of the options of all calls of `new_group`, in a world of one process."""
    calls: list[dict[str, Any]] = []
    if not dist.is_nccl_available():
        patch = SimpleNamespace(Options=Options)
        monkeypatch.setattr(dist, "ProcessGroupNCCL", patch, raising=False)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)

    def new_group(row: list[int], **options: Any) -> Any:
        calls.append(options)
        return SimpleNamespace(group_name=c10d._process_group_name(row, use_hashed_name=True))

    monkeypatch.setattr(dist, "new_group", new_group)
    return calls


def test_communicator_options(group_options: list[dict[str, Any]]) -> None:
    """Communicators share no resources. Their timeout is longer than schedir's own timeout."""
    process_groups.make_group([[0]], 7.0, "cuda")
    process_groups.make_group([[0]], 7.0, "cuda", 8)
    process_groups.make_group([[0]], None, "cuda")
    process_groups.make_group([[0]], 7.0)
    plain, edge, without_timeout, gloo = group_options
    for over_nccl in (plain, edge, without_timeout):
        options = over_nccl["pg_options"]
        assert over_nccl["backend"] == "nccl" and options.is_high_priority_stream
        assert options.config.split_share == 0
    config = edge["pg_options"].config
    assert (config.min_ctas, config.max_ctas) == (1, 8)
    for over_nccl in (plain, edge):
        assert over_nccl["timeout"] == over_nccl["pg_options"]._timeout > timedelta(seconds=60)
    assert without_timeout["timeout"] is None
    assert gloo["timeout"].total_seconds() == 7 and "backend" not in gloo


@pytest.mark.parametrize(
    ("size", "most"),
    [(0, 4), (1, 2), (4 << 20, 2), ((4 << 20) + 1, 4), (4096 * 2048 * 2, 8), (1 << 30, 16)],
)
def test_max_ctas_of_edge_grow_with_its_message_bytes(size: int, most: int) -> None:
    assert process_groups.choose_max_ctas(size) == most


def test_memory_check_counts_only_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host has the weights. A GPU has gradients, moments and activations."""
    model = gpt_config.GPTConfig(256, 4, 512, 8, 2048)
    monkeypatch.setattr(
        "os.sysconf", lambda name: 1 if "SIZE" in name else 8 * model.num_parameters
    )
    train.check_memory(run_config.Config(model, train=TrainConfig(device="cuda")), 1)
    with pytest.raises(UsageError):
        train.check_memory(run_config.Config(model), 1)
    with pytest.raises(UsageError):
        train.check_memory(run_config.Config(model, train=TrainConfig(device="cuda")), 3)


def test_memory_check_counts_shards_of_replicas_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Optimizer states, gradients and weights have `bytes_each` bytes per parameter.

    Each replica creates the full weights. Activations and tokens are small.
    """
    model = gpt_config.GPTConfig(256, 4, 512, 8, 2)
    for zero, bytes_each in enumerate((16, 8 + 8 / 4, 4 + 12 / 4, 4)):
        pipeline = run_config.PipelineConfig(dp=4, **dict[str, Any](zero=zero))
        for factor, fits in ((1.01, True), (0.99, False)):
            host_bytes = int(factor * bytes_each * model.num_parameters)
            monkeypatch.setattr(
                "os.sysconf",
                lambda name, host_bytes=host_bytes: 1 if "SIZE" in name else host_bytes,
            )
            with nullcontext() if fits else pytest.raises(UsageError):
                train.check_memory(run_config.Config(model, pipeline), 1)
