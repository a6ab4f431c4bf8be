"""Tests of common mistakes with modules, processes and torch.distributed.pipelining."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from schedir import compile
from schedir.checkpoints import load, save
from schedir.errors import CheckpointError, ExecutionError, ModelError, SchedirError, UsageError
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.models.huggingface import cut
from schedir.runtime import Executor, GlooTransport, InProcessExecutor
from schedir.transports.transport import PeerLeft
from tests.cpu.drop_in_steps import N_MICROBATCHES, make_schedule
from tests.cpu.gloo_processes import run, run_fresh
from tests.cpu.torch_pipelines import WIDTH, make_model
from tests.cpu.train_command import Run

PROGRAM = compile("one_f_one_b", PipelineShape(2, 4))


class DistributedDataParallel(nn.Module):
    """A wrapper with the name of torch's class, which needs no process group."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


@pytest.mark.parametrize(
    ("stage", "message", "hint"),
    [
        (
            DistributedDataParallel(nn.Linear(8, 8)),
            "stage 0 is wrapped in DistributedDataParallel, but the executor itself reduces",
            "pass the module without the wrapper, and compile(..., dp=2)",
        ),
        (
            nn.Sequential(nn.DataParallel(nn.Linear(8, 8))),
            "module '0' of stage 0 is wrapped in DataParallel",
            "pass the module without the wrapper, and compile(..., dp=2)",
        ),
        (
            nn.LazyLinear(8),
            "weight of stage 0 has no shape before the first forward of its lazy module",
            "call each stage once, in order, before you create the executor and the optimizer",
        ),
    ],
    ids=["ddp", "data parallel within", "lazy"],
)
def test_wrapped_and_lazy_stages_are_refused(stage: nn.Module, message: str, hint: str) -> None:
    with pytest.raises(ModelError) as caught:
        InProcessExecutor(PROGRAM, [stage, nn.Linear(8, 8)], loss=mse_loss, boundary=(2, 8))
    assert message in str(caught.value)
    assert caught.value.hint == hint


@pytest.mark.parametrize(
    ("name", "expression"),
    [
        ("train_step", "executor.step(inputs, targets)"),
        ("zero_grad", "executor.step, which includes this"),
        ("state_dict", "schedir.checkpoints.save(executor, directory, step=1)"),
        ("eval", "executor.evaluate(inputs, targets)"),
    ],
)
def test_attributes_of_other_trainers_get_hint(name: str, expression: str) -> None:
    stages = [nn.Linear(8, 8), nn.Linear(8, 8)]
    executor = InProcessExecutor(PROGRAM, stages, loss=mse_loss, boundary=(2, 8))
    with pytest.raises(AttributeError, match=f"has no attribute '{name}': use ") as caught:
        getattr(executor, name)
    assert str(caught.value).endswith(expression)


def test_transport_without_process_group_is_refused() -> None:
    with pytest.raises(ModelError, match="GlooTransport needs a process group") as caught:
        GlooTransport(PROGRAM)
    assert 'call torch.distributed.init_process_group("gloo") first' in caught.value.hint


def create_alone(rank: int, what: str) -> str:
    """Return the error of process 0, which creates an object that process 1 does not create."""
    group = dist.new_group(timeout=timedelta(seconds=3))
    if what == "a GlooTransport" and rank:
        return ""
    transport = GlooTransport(PROGRAM, group=group)
    if rank:
        return ""
    stages = {0: nn.Linear(8, 8)}
    try:
        Executor(PROGRAM, 0, stages, transport, loss=mse_loss, boundary=(2, 8))
    except ExecutionError as error:
        return str(error)
    return "accepted"


def create_transport_alone(rank: int) -> str:
    """Return the error of a transport that only process 0 creates."""
    try:
        return create_alone(rank, "a GlooTransport")
    except ExecutionError as error:
        return str(error)


@pytest.mark.parametrize(
    ("function", "arguments", "what"),
    [
        (create_transport_alone, (), "a GlooTransport"),
        (create_alone, ("an Executor",), "an Executor"),
    ],
)
def test_object_created_on_one_rank_is_refused(function: Any, arguments: Any, what: str) -> None:
    error, _ = run_fresh(function, 2, *arguments)
    assert f"while this process created {what}" in error
    assert f"all processes of the group must create {what} at the same place" in error


def find_drop_in_errors(_: int, runtime: str) -> dict[str, str]:
    """Return the errors of steps in one process."""
    x, y = torch.ones(2 * N_MICROBATCHES, WIDTH), torch.ones(2 * N_MICROBATCHES, WIDTH)
    errors = {}
    for name, options, target in (
        ("no loss", {"loss_fn": None}, y),
        ("short target", {}, torch.ones(3 * N_MICROBATCHES, WIDTH)),
        ("no reduction", {"loss_fn": nn.MSELoss(reduction="none")}, y),
        ("dict", {}, {"y": y}),
    ):
        parts = dict(enumerate(make_model(2)))
        schedule = make_schedule(parts, 2, schedule="interleaved", runtime=runtime, **options)
        try:
            schedule.step(x, target=target)
            errors[name] = "accepted"
        except Exception as error:
            notes = getattr(error, "__notes__", [])
            is_own = isinstance(error, SchedirError)
            errors[name] = "\n".join([f"{is_own} {error}", *notes])
    return errors


@pytest.mark.parametrize("runtime", ["torch", "schedir"])
def test_drop_in_errors_explain_losses_and_targets(runtime: str) -> None:
    (errors,) = run(find_drop_in_errors, 1, runtime)
    assert "interleaved: step got a target, but loss_fn is None" in errors["no loss"]
    assert "must return a floating-point tensor with one element" in errors["no reduction"]
    assert "target must be a tensor, not a dict" in errors["dict"]
    if runtime == "torch":
        assert "in loss_fn of microbatch 0: the output of the last stage" in errors["short target"]
        assert f"[2, {WIDTH}] of torch.float32, and the target is" in errors["short target"]


def train_as_rank(folder: Path, **variables: str) -> str:
    """Return the error of `schedir train` in a process that a launcher started."""
    (folder / "c.toml").write_text("[pipeline]\nranks = 2\n")
    code, _, error = Run(["train", str(folder / "c.toml")], folder, **variables).finish()
    assert code
    return error


def test_wrong_number_of_torchrun_processes_is_refused(tmp_path: Path) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "LOCAL_RANK": "0"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512"}
    error = train_as_rank(tmp_path, **variables, **address)
    assert "there are 3 processes, but pp 2 x tp 1 x dp 1 needs 2" in error
    assert "hint: torchrun --nproc-per-node 2 on one machine, or change pipeline.ranks" in error


def test_left_rank_of_one_process_is_refused(tmp_path: Path) -> None:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512"}
    error = train_as_rank(tmp_path, RANK="0", WORLD_SIZE="1", **address)
    assert "there is 1 process, but pp 2 x tp 1 x dp 1 needs 2" in error
    assert "hint: unset RANK, and schedir starts the processes" in error


def test_rank_without_master_address_is_refused(tmp_path: Path) -> None:
    error = train_as_rank(tmp_path, RANK="0", WORLD_SIZE="2")
    assert "RANK is set, but MASTER_ADDR and MASTER_PORT are not" in error


def test_one_optimizer_for_several_ranks_is_refused() -> None:
    """The executor would step it once for each rank."""
    stages = [nn.Linear(8, 8) for _ in range(2)]
    optimizer = torch.optim.SGD([p for stage in stages for p in stage.parameters()])
    with pytest.raises(ModelError, match="returned one optimizer for several ranks") as caught:
        InProcessExecutor(
            PROGRAM, stages, loss=mse_loss, boundary=(2, 8), optimizer=lambda _: optimizer
        )
    assert "lambda parameters: torch.optim.AdamW(parameters)" in caught.value.hint


def create_saved_run() -> InProcessExecutor:
    """Return a run that can be saved."""
    stages = [nn.Linear(8, 8) for _ in range(2)]
    return InProcessExecutor(PROGRAM, stages, loss=mse_loss, boundary=(2, 8))


def test_error_of_loss_describes_output_and_target() -> None:
    """The arguments of this loss are in the wrong order."""
    stages = [nn.Linear(8, 8) for _ in range(2)]
    executor = InProcessExecutor(
        PROGRAM, stages, loss=lambda target, y: cross_entropy(y, target), boundary=(2, 8)
    )
    with pytest.raises(ExecutionError, match=r"in the loss: output is Tensor \[2, 8\]") as caught:
        executor.step(torch.ones(4, 2, 8), torch.ones(4, 2, dtype=torch.int64))
    assert "and target is Tensor [2] of torch.int64" in caught.value.fact


def test_grad_scale_of_0_is_refused() -> None:
    x = torch.ones(4, 2, 8)
    with pytest.raises(ExecutionError, match="grad_scale is 0") as caught:
        create_saved_run().step(x, x, grad_scale=1 // 4)
    assert caught.value.hint == "grad_scale=1/4; `//` rounds to an integer"


class LostPeer(nn.Linear):
    """A stage that fails as a message does if only one rank makes a step and the other ends."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise PeerLeft("rank 1 has ended")


def test_step_on_one_rank_gets_hint() -> None:
    stages = [LostPeer(8, 8), nn.Linear(8, 8)]
    executor = InProcessExecutor(PROGRAM, stages, loss=mse_loss, boundary=(2, 8))
    with pytest.raises(ExecutionError, match="rank 1 has ended") as caught:
        executor.step(torch.ones(4, 2, 8), torch.ones(4, 2, 8))
    assert "otherwise all processes must call step" in caught.value.hint


def test_load_of_similar_folder_warns(tmp_path: Path) -> None:
    save(create_saved_run(), tmp_path / "checkpoints1", step=1)
    with pytest.warns(UserWarning, match="checkpoints1 has checkpoints"):
        assert load(create_saved_run(), tmp_path / "chekpoints1") is None
    # Without a warning: a second run often has the same name with another number or letter.
    for name in ("checkpoints2", "checkpoints_b", "other"):
        assert load(create_saved_run(), tmp_path / name) is None


def test_tensor_in_extra_state_is_refused(tmp_path: Path) -> None:
    state = {"epoch": 1, "rng": torch.zeros(3)}
    with pytest.raises(CheckpointError, match="but 'rng' is Tensor") as caught:
        save(create_saved_run(), tmp_path, step=1, extra_state=state)
    assert "a tensor has tolist()" in caught.value.hint


@pytest.mark.parametrize("runtime", ["torch", "schedir"])
def test_drop_in_step_without_inputs_is_refused(runtime: str) -> None:
    (error,) = run(find_missing_input_error, 1, runtime)
    assert "step got no inputs, but this rank has stage 0, which needs them" in error


def find_missing_input_error(_: int, runtime: str) -> str:
    """Return the error of a step without inputs."""
    stages = dict(enumerate(make_model(2)))
    schedule = make_schedule(stages, 2, schedule="interleaved", runtime=runtime)
    try:
        schedule.step(target=torch.ones(2 * N_MICROBATCHES, WIDTH))
    except SchedirError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("model", "stages", "message"),
    [
        ("gpt2", 2, "model must be a Module, not 'gpt2'"),
        (nn.Linear(8, 8), [1, 1], r"stages must be an? int, not \[1, 1\]"),
    ],
    ids=["name", "layers"],
)
def test_wrong_arguments_of_cut_are_refused(model: Any, stages: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        cut(model, stages)


@pytest.mark.parametrize(
    ("call", "fact", "hint"),
    [
        (lambda e, x: e.step(x), "step needs targets", "executor.step(inputs, targets)"),
        (lambda e, x: e.step(), "step needs inputs and targets", "executor.step(inputs, targets)"),
        (lambda e, x: e.step(input=x, targets=x), "no argument 'input'", "'inputs'"),
        (lambda e, x: e.evaluate(x), "evaluate needs targets", "executor.evaluate("),
        (
            lambda e, x: e.step(x, x, 1.0, None, (), PROGRAM),
            "only inputs, targets, grad_scale, order_seed, keywords can be given without a name",
            "executor.step(inputs, targets)",
        ),
    ],
    ids=["no targets", "no arguments", "input", "evaluate", "too many"],
)
def test_wrong_arguments_of_a_step_are_refused(call: Any, fact: str, hint: str) -> None:
    stages = [nn.Linear(8, 8) for _ in range(2)]
    executor = InProcessExecutor(PROGRAM, stages, loss=mse_loss, boundary=(2, 8))
    with pytest.raises(UsageError) as caught:
        call(executor, torch.ones(4, 2, 8))
    assert fact in caught.value.fact and hint in caught.value.hint
    executor.step(torch.ones(4, 2, 8), torch.ones(4, 2, 8))  # the executor still works


def test_step_with_optimizer_needs_backwards() -> None:
    program = compile("forward_only", PipelineShape(2, 4))
    x = torch.ones(4, 2, 8)

    def make(optimizer: Any) -> InProcessExecutor:
        stages = [nn.Linear(8, 8) for _ in range(2)]
        return InProcessExecutor(
            program, stages, loss=mse_loss, boundary=(2, 8), optimizer=optimizer
        )

    executor = make(torch.optim.AdamW)
    with pytest.raises(
        ModelError, match="step needs backwards, but the program has only"
    ) as caught:
        executor.step(x, x)
    assert caught.value.hint.startswith("evaluate(inputs, targets), or a schedule with B")
    assert executor.evaluate(x, x) >= 0
    assert make(None).step(x, x) >= 0


@pytest.mark.parametrize("boundary", [(8, 8), (4, 2, 8), (8,)], ids=str)
def test_boundary_of_batch_has_hint(boundary: Any) -> None:
    stages = [nn.Linear(8, 8) for _ in range(2)]
    executor = InProcessExecutor(PROGRAM, stages, loss=mse_loss, boundary=boundary)
    with pytest.raises(ExecutionError, match=r"returns \[2, 8\]") as caught:
        executor.step(torch.ones(4, 2, 8), torch.ones(4, 2, 8))
    assert "a boundary is for one microbatch: Boundary((2, 8)) fits" in caught.value.hint


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_wrong_dtype_of_boundary_has_hint(dtype: torch.dtype) -> None:
    stages = [nn.Linear(8, 8, dtype=dtype) for _ in range(2)]
    x = torch.ones(4, 2, 8, dtype=dtype)
    executor = InProcessExecutor(PROGRAM, stages, loss=mse_loss, boundary=(2, 8))
    with pytest.raises(ExecutionError, match=f"returns .* of {dtype}, but the boundary") as caught:
        executor.step(x, x)
    assert caught.value.hint.endswith(f"the boundary is Boundary((2, 8), {dtype})")


def test_norm_in_place_of_switch_has_hint() -> None:
    with pytest.raises(UsageError, match="must be True or False, not 0") as caught:
        compile("gpipe", PipelineShape(2, 4), clip_grad_norm=0.5)  # type: ignore[arg-type]
    assert caught.value.hint.endswith("GradientOptions(max_norm=1.0) for the executor")
