"""Check that a pipeline step of any library computes the gradients of a plain loop."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from schedir.call_errors import explain_wrong_calls
from schedir.errors import ExecutionError, UsageError, describe
from schedir.runtime.arguments import require_callable, require_loss
from schedir.testing.gradient_comparison import GradientDump, compare_gradients
from schedir.testing.unpipelined_model import (
    UnpipelinedModel,
    copy_model,
    find_parameter_names,
    split_batch,
    to_dense,
)
from schedir.transports.local_processes import DIED_MESSAGE, RankError, run_processes

StepFunction = Callable[[int, int, Any, Any], Mapping[str, Tensor | None] | None]


@explain_wrong_calls("assert_same_gradients(step, model, batch, ranks=2, microbatches=4)")
def assert_same_gradients(
    step: StepFunction,
    model: nn.Module | Sequence[nn.Module],
    batch: Any,
    *,
    ranks: int,
    microbatches: int | None = None,
    loss_fn: Callable[..., Tensor] | None = None,
    reduction: Literal["mean", "sum"] | float = "mean",
    replicas: int = 1,
    tolerance: float | None = None,
    timeout: float = 60.0,
    start_method: Literal["fork", "spawn"] | None = None,
) -> float:
    """Assert that a pipeline step of any library computes the gradients of a plain loop.

    The plain loop runs the model without a pipeline, in the calling process.  The loop computes
    `loss_fn(model(inputs), targets)` for each microbatch.  Inputs that are a tuple or a dict are
    passed as the arguments of the model.

    The step runs in `ranks` processes.  The processes are forks of the calling process, so `step`
    may be any function.  They are spawned instead, and `step` is pickled by its name, in these
    cases: there is a GPU, the system is not Linux, the calling process has a process group, or
    `start_method` is "spawn".

    A gradient is correct if the norm of its difference from the expected gradient is at most
    `tolerance` times a reference. The reference is the sum, over all microbatches, of the norm of
    the microbatch's gradient.

    Args:
        step: Called as `step(rank, ranks, model, batch)` in each process.  torch.distributed is
            initialised over Gloo.  Each process has its own copy of `model`, and the full `batch`
            even if there are replicas.  The step builds stages from the modules of the model, and
            runs them on `batch` once or several times.  The step accumulates gradients and runs no
            optimizer.  Gradients are then read from the `.grad` of the parameters.  A step that
            works on copies of the modules returns `{name: gradient}` instead, by the parameter
            names of `model`.
        model: The model, on the CPU, or a list of its stages. Differences are reported by stage if
            the model is a list, or if the stages are stages of torch.distributed.pipelining.
        batch: Tensors, or tuples and dicts of tensors.  Each tensor is split along its first
            dimension.  A list counts as a list of microbatches.  With a `loss_fn`, the batch or
            each microbatch is a pair of inputs and targets.
        ranks: The number of processes.
        microbatches: The number of microbatches of all replicas together.  It may be None if
            `batch` is a list.
        loss_fn: A function that returns the loss of one microbatch.  If None, the model returns the
            loss.
        reduction: The reduction of the losses of all microbatches: "mean", "sum", or a number, by
            which their sum is divided.  The expected gradient is the gradient of the result.
        replicas: The number of data-parallel replicas, which divides `microbatches`.  The step
            selects the microbatches of its replica from `batch`, and reduces the gradients over the
            replicas.  Each replica must then have the expected gradient of all microbatches.
        tolerance: The largest allowed norm of a difference, divided by the sum of the norms of the
            microbatches' gradients.  The default is 1e-6 in float32, 1e-12 in float64, and 8 times
            the `eps` of any other type. This larger default hides small errors in types such as
            bfloat16. 0 requires equal bits.
        timeout: Seconds after which a rank that still runs the step counts as hung.
        start_method: "fork" or "spawn".  The default is described above.

    Returns:
        The largest relative error: the norm of a difference over the norm of the expected gradient.

    Raises:
        AssertionError: Gradients differ.  `differences` of the error lists stages, ranks, parameter
            names and relative errors.
        ExecutionError: A rank failed, or did not return within `timeout` seconds.
        UsageError: An argument is invalid, or the model or the batch cannot be compared.  A model
            with dropout is an example.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from schedir.testing import assert_same_gradients
        >>> def step(rank, ranks, model, batch):  # the loop of a pipeline of one rank
        ...     for x, y in zip(*(part.chunk(4) for part in batch)):
        ...         nn.functional.mse_loss(model(x), y).backward()
        >>> model, batch = nn.Linear(3, 1), (torch.randn(8, 3), torch.randn(8, 1))
        >>> mse = nn.functional.mse_loss
        >>> off = assert_same_gradients(
        ...     step, model, batch, ranks=1, microbatches=4, loss_fn=mse, reduction="sum"
        ... )
        >>> off < 1e-6
        True
        >>> try:
        ...     assert_same_gradients(step, model, batch, ranks=1, microbatches=4, loss_fn=mse)
        ... except AssertionError as error:
        ...     print(error)
        2 of 2 gradients differ from those of a plain loop
          rank 0, all 2 parameters: relative error 3, norm 4 times the expected norm
    """
    require_callable(step, "step", "def step(rank, ranks, model, batch): ...")
    if loss_fn is not None:
        require_loss(loss_fn)
    full_model = _join_stages(model)
    batches = split_batch(batch, microbatches, loss_fn)
    divisor = _find_divisor(reduction, len(batches))
    _require_counts(ranks, replicas, len(batches))
    _require_nonnegative("timeout", timeout)
    if tolerance is not None:
        _require_nonnegative("tolerance", tolerance)
    if start_method not in (None, "fork", "spawn"):
        raise UsageError(
            f"start_method must be 'fork' or 'spawn', not {describe(start_method)}",
            fields=["start_method"],
        )
    loop = UnpipelinedModel(copy_model(full_model), batches, loss_fn, divisor)
    method = start_method or ("spawn" if _forks_are_unsafe() else "fork")
    with _use_one_thread(), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        if not loop.expected_gradients:
            raise UsageError("the loss does not depend on any trainable parameter of the model")
        dumps = _run_processes(step, full_model, batch, ranks, method, timeout)
        if full_model is not model:
            dumps = [dump.infer_stages() for dump in dumps]
        return compare_gradients(loop, dumps, replicas=replicas, tolerance=tolerance)


def _join_stages(model: Any) -> nn.Module:
    """Return the model, or the list of its stages, as one module."""
    if isinstance(model, list | tuple) and all(isinstance(part, nn.Module) for part in model):
        model = nn.Sequential(*model)
    if not isinstance(model, nn.Module):
        raise UsageError(f"model must be an nn.Module or a list of stages, not {describe(model)}")
    if any(map(is_lazy, model.parameters())):
        raise UsageError(
            "model has lazy parameters that have no values yet",
            hint="run a forward of the model first",
        )
    devices = {str(p.device) for p in model.parameters()}
    if devices - {"cpu"}:
        raise UsageError(
            "model must be on the CPU, because the processes compute there, not on "
            f"{', '.join(sorted(devices))}",
            hint="model.cpu()",
        )
    return model


def _find_divisor(reduction: object, microbatches: int) -> float:
    """Return the number by which the sum of the losses is divided."""
    if reduction == "mean":
        return microbatches
    if reduction == "sum":
        return 1
    if isinstance(reduction, int | float) and not isinstance(reduction, bool) and reduction > 0:
        return reduction
    raise UsageError(
        "reduction must be 'mean', 'sum', or a positive number by which the sum is divided, not "
        f"{describe(reduction)}",
        fields=["reduction"],
    )


def _require_counts(ranks: object, replicas: object, microbatches: int) -> None:
    """Verify the numbers of ranks and replicas."""
    for name, number in (("ranks", ranks), ("replicas", replicas)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise UsageError(
                f"{name} must be an integer, 1 or more, not {describe(number)}", fields=[name]
            )
    assert isinstance(replicas, int)
    if microbatches % replicas:
        raise UsageError(
            f"microbatches {microbatches} cannot be divided among {replicas} replicas",
            fields=["microbatches", "replicas"],
            hint="microbatches counts the microbatches of all replicas together",
        )


def _require_nonnegative(name: str, number: object) -> None:
    if not isinstance(number, int | float) or isinstance(number, bool) or not number >= 0:
        raise UsageError(f"{name} must be 0 or more, not {describe(number)}", fields=[name])


def _forks_are_unsafe() -> bool:
    """Return whether processes must be spawned, because this process cannot be forked safely.

    With a GPU, autograd starts threads for the GPU at the first backward, and then refuses forks.
    """
    is_linux = sys.platform.startswith("linux")
    return not is_linux or dist.is_initialized() or torch.accelerator.is_available()


@contextmanager
def _use_one_thread() -> Iterator[None]:
    """Compute with one thread, as the ranks do.

    With more threads, sums may round differently.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _run_processes(
    step: StepFunction, model: nn.Module, batch: Any, ranks: int, start_method: str, timeout: float
) -> list[GradientDump]:
    """Run the step in one process per rank, and return the gradients of each rank."""
    if start_method == "spawn":
        for subject, value in (("the step", step), ("the model", model), ("the batch", batch)):
            try:
                pickle.dumps(value)
            except Exception:
                raise UsageError(
                    f"{subject} cannot be pickled, but start_method 'spawn' must pickle it for the "
                    "processes",
                    hint="use functions and classes that are defined at the top level of a module",
                ) from None
    context = multiprocessing.get_context(start_method)
    try:
        dumps = run_processes(
            _run_rank,
            ranks,
            step,
            ranks,
            model,
            batch,
            context=context,
            timeout=timeout,
            grace_seconds=0.1,
        )
    except RankError as error:
        raise _make_step_error(error, timeout) from None
    for rank, dump in enumerate(dumps):
        if isinstance(dump, str):
            raise UsageError(f"rank {rank}: {dump}")
    return dumps


def _run_rank(
    rank: int, step: StepFunction, ranks: int, model: nn.Module, batch: Any
) -> GradientDump | str:
    """Run the step in the process of a rank.

    Returns:
        The gradients that the rank has after the step, or the text of an error if the step or its
        result cannot be compared.
    """
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{ranks}"}
    model.zero_grad(set_to_none=True)
    # Names are read before the step, because the step may wrap modules and replace parameters.
    modules = {name: module for name, module in model.named_modules(remove_duplicate=False)}
    values_before = {
        name: p.detach().clone()
        for p, names in find_parameter_names(model).items()
        for name in names
    }
    known_names = {name for names in find_parameter_names(model).values() for name in names}
    with torch.enable_grad(), _record_torch_stages() as torch_stages:
        step_result = step(rank, ranks, model, batch)
    if step_result is not None and not isinstance(step_result, Mapping):
        return f"step must return None or {{name: gradient}}, not {describe(step_result)}"
    names_by_parameter = _find_current_names(modules, known_names)
    for p, names in names_by_parameter.items():
        if type(p) is nn.Parameter and not torch.equal(p, values_before[names[0]]):
            return f"step changed {names[0]}: a step must not run an optimizer"
    stages: dict[int, tuple[str, ...]] = {}
    gradients: dict[str, Tensor | None] = {}
    for stage in torch_stages:
        name_by_parameter = _find_stage_names(stage.submod, modules, names_by_parameter)
        if step_result is None and None in name_by_parameter.values():
            return (
                f"stage {stage.stage_index} has parameters that `model` does not have: build the "
                "stage from modules of `model`, or return {name: gradient} with names of `model`"
            )
        parameter_by_name = {name: p for p, name in name_by_parameter.items() if name}
        stages[stage.stage_index] = tuple(parameter_by_name)
        if step_result is None:
            for name, p in parameter_by_name.items():
                gradients[name] = _to_full_gradient(p.grad)
    if step_result is None:
        for p, names in names_by_parameter.items():
            if p.grad is not None and gradients.keys().isdisjoint(names):
                gradients[names[0]] = _to_full_gradient(p.grad)
    for name, gradient in (step_result or {}).items():
        if name not in known_names:
            suggestion = " or ".join(get_close_matches(name, known_names, 2))
            suggestion = suggestion or min(known_names, default="none")
            return f"step returned {name!r}, and the model has no such parameter, but {suggestion}"
        gradients[name] = _to_full_gradient(gradient)
    return GradientDump(gradients, stages)


def _find_current_names(
    modules: Mapping[str, nn.Module], known_names: Set[str]
) -> dict[nn.Parameter, tuple[str, ...]]:
    """Return the current parameters of the modules, each with its names in `known_names`."""
    result: dict[nn.Parameter, tuple[str, ...]] = {}
    for module_name, module in modules.items():
        for local_name, p in module.named_parameters(recurse=False):
            name = f"{module_name}.{local_name}" if module_name else local_name
            if name in known_names:
                result[p] = (*result.get(p, ()), name)
    return result


def _find_stage_names(
    stage_module: nn.Module,
    modules: Mapping[str, nn.Module],
    parameter_names: Mapping[nn.Parameter, tuple[str, ...]],
) -> dict[nn.Parameter, str | None]:
    """Return the name of each parameter of a stage in the model; None if the model lacks it.

    A tied parameter has several names.  If the stage contains a module of the model that has the
    parameter, the name within this module is returned.
    """
    module_names: dict[nn.Module, str] = {}
    for name, module in modules.items():
        module_names.setdefault(module, name)
    result: dict[nn.Parameter, str | None] = {}
    for module in stage_module.modules():
        for name, p in module.named_parameters(recurse=False):
            full_name = (
                f"{module_names[module]}.{name}".lstrip(".") if module in module_names else name
            )
            names = parameter_names.get(p, ())
            result.setdefault(p, full_name if full_name in names else names[0] if names else None)
    return result


@contextmanager
def _record_torch_stages() -> Iterator[list[Any]]:
    """Collect the stages of torch.distributed.pipelining that are created in this context."""
    from torch.distributed.pipelining.stage import _PipelineStageBase as Base

    stages: list[Any] = []
    original_init = Base.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original_init(self, *args, **kwargs)
        stages.append(self)

    Base.__init__ = init  # type: ignore[method-assign]
    try:
        yield stages
    finally:
        Base.__init__ = original_init  # type: ignore[method-assign]


def _to_full_gradient(gradient: Tensor | None) -> Tensor | None:
    """Convert a gradient, which may be sharded (a DTensor) or sparse, to one dense tensor."""
    if gradient is None:
        return None
    full_gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return to_dense(full_gradient).detach()


def _make_step_error(error: RankError, timeout: float) -> ExecutionError:
    """Return an error that describes in a few lines which ranks raised or hung, and where."""
    if error.hung_ranks:
        # Rank -> the line of the step that it runs.
        step_lines = {rank: _find_step_line(error.tracebacks[rank]) for rank in error.hung_ranks}
        known_lines = {rank: step_line for rank, step_line in step_lines.items() if step_line}
        late_lines = known_lines or step_lines
        subject = f"rank{'s' * (len(late_lines) > 1)} {', '.join(map(str, late_lines))}"
        lines = [
            f"  rank {rank} is at {step_line or 'its start'}"
            for rank, step_line in late_lines.items()
        ]
        return ExecutionError(
            "\n".join([f"{subject} did not finish the step in {timeout:g} s", *lines])
        )
    tracebacks = error.tracebacks
    dead_ranks = [rank for rank, text in tracebacks.items() if text.startswith(DIED_MESSAGE)]
    # If a rank died, the other ranks only report lost connections.
    rank = (dead_ranks or [*tracebacks])[0]
    lines = tracebacks[rank].rstrip().splitlines()
    frames = [k for k, line in enumerate(lines) if line.startswith('  File "')]
    message = next((line for line in lines[max(frames, default=0) :] if line[:1] != " "), lines[-1])
    first_frame = next(
        (k for k, line in enumerate(lines) if line.endswith(f"in {_run_rank.__name__}")), None
    )
    shown_lines = lines[first_frame + 2 :] if first_frame is not None else []
    source_lines = [f"  {line}" for line in shown_lines if {*line} - {*" ^~"}]
    return ExecutionError("\n".join([f"step failed on rank {rank}: {message}", *source_lines]))


def _find_step_line(stack: str) -> str:
    """Return the line of code of the step that a rank runs, or "" if the rank is not in the step.

    Args:
        stack: The stacks of the rank's threads from `faulthandler`, the innermost call first.
    """
    for thread in stack.split("\nThread "):
        frames = re.findall(r'File "(.+)", line (\d+) in (.+)', thread)
        calls = [function for _, _, function in frames]
        if _run_rank.__name__ in calls:
            inner_frames = frames[: calls.index(_run_rank.__name__)]
            user_frames = [frame for frame in inner_frames if "site-packages" not in frame[0]]
            file, line, function = (user_frames or inner_frames or frames)[0]
            return f"{file}:{line}, in {function}"
    return ""
