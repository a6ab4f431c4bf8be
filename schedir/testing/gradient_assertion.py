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

    `step(rank, ranks, model, batch)` is called in `ranks` processes, in which torch.distributed is
    initialised over Gloo.  Each process has its own copy of `model`.  The step builds stages of its
    modules and runs them on `batch`, once or several times, and accumulates gradients.  They are
    read from the `.grad` of the parameters afterwards.  A step that works on copies of modules
    returns `{name: gradient}` by the names of `model`.  Stages of torch.distributed.pipelining are
    known by their numbers.  For other libraries pass `model` as a list of its stages.

    The plain loop cuts each tensor of `batch` into `microbatches` along its first dimension, and a
    list is taken as cut already.  For each microbatch, which is a pair of inputs and targets, it
    computes `loss_fn(model(inputs), targets)`.  Without a `loss_fn` the model returns the loss.
    Inputs that are a tuple or a dict are passed as the arguments of the model.  The expected
    gradient is that of the `"mean"` of these losses, of their `"sum"`, or of that sum divided by a
    number.  With `replicas`, the first replica gets the first microbatches, and the same gradient
    is expected on each.

    Two gradients are the same if the norm of their difference is at most `tolerance` times the sum
    of the norms of its microbatches' gradients.  The default is 1e-6 in float32, 1e-12 in float64,
    and 8 times the type's `eps` otherwise, which hides small errors.  0 demands the same bits.
    Returns the largest norm of a difference over the norm of the expected gradient.

    Processes are forks of this one, so `step` may be any function.  They are spawned, and `step` is
    pickled by its name, if there is a GPU, if a process group is in use here, or with
    `start="spawn"`.

    Raises AssertionError if gradients differ.  Its `differences` list the stages, ranks, names of
    parameters and relative errors.  Raises schedir.errors.ExecutionError if a rank fails, or does
    not return within `timeout` seconds, and UsageError if the model or the batch cannot be
    compared, for example a model with dropout.

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
    whole = _join_stages(model)
    several = split_batch(batch, microbatches, loss_fn)
    divisor = _find_divisor(reduction, len(several))
    _require_counts(ranks, replicas, len(several))
    _require_nonnegative("timeout", timeout)
    if tolerance is not None:
        _require_nonnegative("tolerance", tolerance)
    if start_method not in (None, "fork", "spawn"):
        raise UsageError(
            f"start_method is 'fork' or 'spawn', not {describe(start_method)}",
            fields=["start_method"],
        )
    loop = UnpipelinedModel(copy_model(whole), several, loss_fn, divisor)
    how = start_method or ("spawn" if _forks_are_unsafe() else "fork")
    with _use_one_thread(), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        if not loop.expected_gradients:
            raise UsageError("the loss depends on no parameter that is trained")
        left = _run_processes(step, whole, batch, ranks, how, timeout)
        if whole is not model:
            left = [one.infer_stages() for one in left]
        return compare_gradients(loop, left, replicas=replicas, tolerance=tolerance)


def _join_stages(model: Any) -> nn.Module:
    """Return the model as one module, also if it was given as a list of its stages."""
    if isinstance(model, list | tuple) and all(isinstance(part, nn.Module) for part in model):
        model = nn.Sequential(*model)
    if not isinstance(model, nn.Module):
        raise UsageError(f"a model is an nn.Module, or its stages in order, not {describe(model)}")
    if any(map(is_lazy, model.parameters())):
        raise UsageError("the model has no weights before its first forward", hint="run it once")
    devices = {str(p.device) for p in model.parameters()}
    if devices - {"cpu"}:
        raise UsageError(
            f"the processes are on a CPU, and the model on {', '.join(sorted(devices))}",
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
        f"losses are reduced to their 'mean', their 'sum', or the sum divided by a number, not "
        f"{describe(reduction)}",
        fields=["reduction"],
    )


def _require_counts(ranks: object, replicas: object, microbatches: int) -> None:
    """Check the numbers of ranks and replicas."""
    for name, number in (("ranks", ranks), ("replicas", replicas)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise UsageError(f"{name} is a number from 1 on, not {describe(number)}", fields=[name])
    assert isinstance(replicas, int)
    if microbatches % replicas:
        raise UsageError(
            f"{microbatches} microbatches cannot be shared out to {replicas} replicas",
            fields=["microbatches", "replicas"],
            hint="microbatches are those of all replicas together",
        )


def _require_nonnegative(name: str, number: object) -> None:
    if not isinstance(number, int | float) or isinstance(number, bool) or not number >= 0:
        raise UsageError(f"{name} is a number from 0 on, not {describe(number)}", fields=[name])


def _forks_are_unsafe() -> bool:
    """Return whether processes must be spawned, because something here does not survive a fork.

    If there is a GPU, autograd starts threads for it at the first backward, and then refuses forks.
    """
    linux = sys.platform.startswith("linux")
    return not linux or dist.is_initialized() or torch.accelerator.is_available()


@contextmanager
def _use_one_thread() -> Iterator[None]:
    """Compute with one thread, as the processes do: with more threads, sums may round otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _run_processes(
    step: StepFunction, model: nn.Module, batch: Any, ranks: int, start_method: str, timeout: float
) -> list[GradientDump]:
    """Run the step in its processes, and return what each rank has after it."""
    if start_method == "spawn":
        for what, value in (("the step", step), ("the model", model), ("the batch", batch)):
            try:
                pickle.dumps(value)
            except Exception:
                raise UsageError(
                    f"processes are spawned, and {what} cannot be pickled for them",
                    hint="a step is a function of a module then, whose name they can import",
                ) from None
    context = multiprocessing.get_context(start_method)
    try:
        left = run_processes(
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
    for rank, one in enumerate(left):
        if isinstance(one, str):
            raise UsageError(f"rank {rank}: {one}")
    return left


def _run_rank(
    rank: int, step: StepFunction, ranks: int, model: nn.Module, batch: Any
) -> GradientDump | str:
    """Run the step in the process of a rank.

    Returns:
        The gradients that the rank has after the step, or an error in words if the step or its
        result cannot be compared.
    """
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{ranks}"}
    model.zero_grad(set_to_none=True)
    # Names are taken before the step, which may wrap modules and replace their parameters.
    modules = {name: module for name, module in model.named_modules(remove_duplicate=False)}
    before = {
        name: p.detach().clone()
        for p, names in find_parameter_names(model).items()
        for name in names
    }
    known = {name for names in find_parameter_names(model).values() for name in names}
    with torch.enable_grad(), _record_torch_stages() as made:
        given = step(rank, ranks, model, batch)
    if given is not None and not isinstance(given, Mapping):
        return f"a step returns nothing, or {{name: gradient}}, and not {describe(given)}"
    owned = _find_current_names(modules, known)
    for p, names in owned.items():
        if type(p) is nn.Parameter and not torch.equal(p, before[names[0]]):
            return f"the step changes {names[0]}: leave the optimizer out, gradients are compared"
    stages: dict[int, tuple[str, ...]] = {}
    gradients: dict[str, Tensor | None] = {}
    for stage in made:
        of = _find_stage_names(stage.submod, modules, owned)
        if given is None and None in of.values():
            return (
                f"stage {stage.stage_index} has parameters that are not those of `model`: build "
                "stages of its own modules, or return {name: gradient} by the names of `model`"
            )
        named = {name: p for p, name in of.items() if name}
        stages[stage.stage_index] = tuple(named)
        if given is None:
            gradients |= {name: _to_full_gradient(p.grad) for name, p in named.items()}
    if given is None:
        for p, names in owned.items():
            if p.grad is not None and gradients.keys().isdisjoint(names):
                gradients[names[0]] = _to_full_gradient(p.grad)
    for name, gradient in (given or {}).items():
        if name not in known:
            like = " or ".join(get_close_matches(name, known, 2)) or min(known, default="none")
            return f"the model has no parameter {name}, but {like}"
        gradients[name] = _to_full_gradient(gradient)
    return GradientDump(gradients, stages)


def _find_current_names(
    modules: Mapping[str, nn.Module], known_names: Set[str]
) -> dict[nn.Parameter, tuple[str, ...]]:
    """Return the parameters that the modules have now, with those names that `known_names`
    contains."""
    found: dict[nn.Parameter, tuple[str, ...]] = {}
    for inside, module in modules.items():
        for own, p in module.named_parameters(recurse=False):
            name = f"{inside}.{own}" if inside else own
            if name in known_names:
                found[p] = (*found.get(p, ()), name)
    return found


def _find_stage_names(
    stage_module: nn.Module,
    modules: Mapping[str, nn.Module],
    parameter_names: Mapping[nn.Parameter, tuple[str, ...]],
) -> dict[nn.Parameter, str | None]:
    """Return the name in the model of each parameter of a stage, or None if it has none.

    A tied parameter has several names.  The one that lies in the stage is returned.
    """
    called: dict[nn.Module, str] = {}
    for name, module in modules.items():
        called.setdefault(module, name)
    found: dict[nn.Parameter, str | None] = {}
    for module in stage_module.modules():
        for name, p in module.named_parameters(recurse=False):
            inside = f"{called[module]}.{name}".lstrip(".") if module in called else name
            names = parameter_names.get(p, ())
            found.setdefault(p, inside if inside in names else names[0] if names else None)
    return found


@contextmanager
def _record_torch_stages() -> Iterator[list[Any]]:
    """Collect the stages of torch.distributed.pipelining that are created in this context."""
    from torch.distributed.pipelining.stage import _PipelineStageBase as Base

    made: list[Any] = []
    before = Base.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        before(self, *args, **kwargs)
        made.append(self)

    Base.__init__ = init  # type: ignore[method-assign]
    try:
        yield made
    finally:
        Base.__init__ = before  # type: ignore[method-assign]


def _to_full_gradient(gradient: Tensor | None) -> Tensor | None:
    """Return a gradient that may be sharded (a DTensor) or sparse as one dense tensor."""
    if gradient is None:
        return None
    full = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return to_dense(full).detach()


def _make_step_error(error: RankError, timeout: float) -> ExecutionError:
    """Return an error that describes in a few lines which ranks raised or hung, and where."""
    if error.hung_ranks:
        stand = {rank: _find_step_line(error.tracebacks[rank]) for rank in error.hung_ranks}
        late = {rank: where for rank, where in stand.items() if where} or stand
        who = f"rank{'s' * (len(late) > 1)} {', '.join(map(str, late))}"
        lines = [f"  rank {rank} stands at {where or 'its start'}" for rank, where in late.items()]
        return ExecutionError(
            "\n".join([f"{who} did not come back from the step in {timeout:g} s", *lines])
        )
    told = error.tracebacks
    dead = [rank for rank, text in told.items() if text.startswith(DIED_MESSAGE)]
    rank = (dead or [*told])[0]  # if one has died, the others only report lost connections
    lines = told[rank].rstrip().splitlines()
    frames = [k for k, line in enumerate(lines) if line.startswith('  File "')]
    what = next((line for line in lines[max(frames, default=0) :] if line[:1] != " "), lines[-1])
    ours = next(
        (k for k, line in enumerate(lines) if line.endswith(f"in {_run_rank.__name__}")), None
    )
    shown = lines[ours + 2 :] if ours is not None else []
    said = [f"  {line}" for line in shown if {*line} - {*" ^~"}]
    return ExecutionError("\n".join([f"the step fails on rank {rank}: {what}", *said]))


def _find_step_line(stack: str) -> str:
    """Return which line of the step a rank runs, or an empty string if it has left the step.

    Args:
        stack: The stacks of its threads from `faulthandler`, the innermost call first.
    """
    for thread in stack.split("\nThread "):
        frames = re.findall(r'File "(.+)", line (\d+) in (.+)', thread)
        calls = [function for _, _, function in frames]
        if _run_rank.__name__ in calls:
            inside = frames[: calls.index(_run_rank.__name__)]
            foreign = [frame for frame in inside if "site-packages" not in frame[0]]
            file, line, function = (foreign or inside or frames)[0]
            return f"{file}:{line}, in {function}"
    return ""
