"""Mark the instructions of Megatron-LM (megatron-core 0.16) as profiler ranges.

The instructions are forwards, backwards, messages and the reduction of gradients.

Megatron's three schedules call `forward_step` and `backward_step`, and post messages through
`_batched_p2p_ops` or `_p2p_ops`. The schedules look up these functions by name in Megatron's
modules, so schedir can wrap them.

A forward has its microbatch and model chunk as arguments. Its stage is chunk * ranks + rank.
schedir tags the outputs of a forward with this stage and microbatch. The backward and the send of
an output read this tag. A rank receives messages in the order in which the sending rank computes
them: the order of Megatron's schedule table. schedir tags a received tensor in this order. The
forward or backward that uses the tensor verifies this tag.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from inspect import signature
from types import FunctionType, SimpleNamespace
from typing import Any, Final, NamedTuple
from warnings import warn

from torch import distributed

from schedir.errors import ExecutionError, UsageError
from schedir.instrumentation.profiler_ranges import (
    FunctionPatches,
    PostedMessages,
    is_profiling,
    make_instruction_range,
    make_posting_range,
    open_reduction_ranges,
    wrap_works,
)

PACKAGE: Final = "megatron-core"
ROOT_MODULE: Final = "megatron.core"
SUPPORTED_VERSION: Final = "0.16.1"
_MODULE: Final = "megatron.core.pipeline_parallel.schedules"

_POSITION_ATTRIBUTE: Final = "_schedir_at"  # the stage and microbatch of a tensor
_NO_PIPELINING: Final = "forward_backward_no_pipelining"
_SCHEDULES: Final = (
    _NO_PIPELINING,
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)
# With these settings, Megatron computes or sends in functions that are not wrapped.
_UNSUPPORTED_SETTINGS: Final = (
    "overlap_moe_expert_parallel_comm",
    "hybrid_context_parallel",
    "use_ring_exchange_p2p",
)
_HINT: Final = "run without schedir.instrument: it does not support this version of megatron-core"


class _MessageStage(NamedTuple):
    stage: int
    mb: int


@dataclass
class _MegatronStep:
    """A step under a profiler, with the messages that the rank receives next.

    Args:
        ranks: The number of pipeline ranks.
        rank: The pipeline rank.
        activations: The stage and microbatch of each activation to receive, in order.
        gradients: The stage and microbatch of each gradient to receive, in order.
    """

    ranks: int
    rank: int
    activations: Iterator[_MessageStage]
    gradients: Iterator[_MessageStage]

    def name_message(self, direction: str, tensor: Any) -> str:
        """Return the name of a message, and tag a tensor that is received.

        `direction`, such as `send_next`, is from the name of the parameter `tensor_{direction}` of
        `_p2p_ops`.
        """
        if direction.startswith("recv"):
            position = next(self.activations if direction == "recv_prev" else self.gradients, None)
            if position is None:
                raise ExecutionError(
                    "Megatron receives more messages than its schedule contains", hint=_HINT
                )
            setattr(tensor, _POSITION_ATTRIBUTE, position)
            action = "RECV_F" if direction == "recv_prev" else "RECV_B"
        else:
            position = _read_tag(tensor)
            action = "SEND_F" if direction == "send_next" else "SEND_B"
        return f"{position.stage}{action}{position.mb}"


_CURRENT_STEP: ContextVar[_MegatronStep | None] = ContextVar("schedir.megatron", default=None)


def add_patches(patches: FunctionPatches) -> None:
    """Add wrappers of Megatron's functions to patches, without installing them.

    Args:
        patches: The patches to which wrappers are added.

    Raises:
        UsageError: Megatron does not have one of the functions.
    """
    schedules: Any = import_module(_MODULE)
    messages: Any = import_module("megatron.core.pipeline_parallel.p2p_communication")
    step_patches = FunctionPatches()
    step_patches.wrap_function(schedules, "forward_step", _run_forward)
    step_patches.wrap_function(schedules, "backward_step", _run_backward)
    step_patches.wrap_function(messages, "_batched_p2p_ops", _post_batch)
    step_patches.wrap_function(messages, "_p2p_ops", _post_one_by_one)
    for name in _SCHEDULES:
        patches.wrap_function(schedules, name, partial(_run_schedule, schedules, step_patches))
    for name in ("get_model_config", "get_schedule_table"):
        if not hasattr(schedules, name):
            raise UsageError(f"{_MODULE} has no {name}")
    if not {"vp_stage", "current_microbatch"} <= {*signature(schedules.forward_step).parameters}:
        raise UsageError(
            f"{_MODULE}.forward_step does not have both parameters vp_stage and current_microbatch"
        )


def _run_schedule(
    schedules: Any, step_patches: FunctionPatches, original: Any, *args: Any, **kwargs: Any
) -> Any:
    if not is_profiling():
        return original(*args, **kwargs)
    arguments = signature(original).bind(*args, **kwargs).arguments
    model = arguments["model"] if isinstance(arguments["model"], list) else [arguments["model"]]
    config = schedules.get_model_config(model[0])
    settings = [name for name in _UNSUPPORTED_SETTINGS if getattr(config, name, False)]
    if settings:
        warn(
            f"schedir adds no profiler ranges to steps of Megatron that use {', '.join(settings)}",
            stacklevel=3,
        )
        return original(*args, **kwargs)
    rank, ranks = _pipeline_position(schedules, original, arguments)
    chunks = len(model)
    table = [(mb, 0) for mb in range(arguments["num_microbatches"])]
    if chunks > 1:
        group = config.microbatch_group_size_per_vp_stage
        table = schedules.get_schedule_table(arguments["num_microbatches"], chunks, group)
    # A message from the last rank to the first rank enters the next chunk. The first stage receives
    # no activations, and the last stage receives no gradients.
    forwards = [(chunk + (rank == 0), mb) for mb, chunk in table]
    backwards = [(chunks - 1 - chunk - (rank == ranks - 1), mb) for mb, chunk in table]
    activations, gradients = (
        [_MessageStage(chunk * ranks + rank, mb) for chunk, mb in order if 0 <= chunk < chunks]
        for order in (forwards, backwards)
    )
    step = _MegatronStep(ranks, rank, iter(activations), iter(gradients))
    stages = range(rank, ranks * chunks, ranks)
    token, finalize = _CURRENT_STEP.set(step), config.finalize_model_grads_func
    if finalize is not None:
        config.finalize_model_grads_func = partial(_reduce_gradients, finalize, stages)
    try:
        with step_patches:
            return original(*args, **kwargs)
    finally:
        config.finalize_model_grads_func = finalize
        _CURRENT_STEP.reset(token)


def _pipeline_position(schedules: Any, original: Any, arguments: dict[str, Any]) -> tuple[int, int]:
    """Return the rank in the pipeline, and the number of ranks."""
    if original.__name__ == _NO_PIPELINING:
        return 0, 1
    communicator = arguments.get("p2p_communicator")
    if communicator is None:
        group = schedules.parallel_state.get_pipeline_model_parallel_group()
    else:
        group = communicator.pp_group
    return group.rank(), group.size()


def _run_forward(original: Any, *args: Any, **kwargs: Any) -> Any:
    step = _CURRENT_STEP.get()
    if step is None:
        return original(*args, **kwargs)
    arguments = signature(original).bind(*args, **kwargs).arguments
    stage = (arguments.get("vp_stage") or 0) * step.ranks + step.rank
    position = _MessageStage(stage, arguments["current_microbatch"])
    _require_tag(arguments["input_tensor"], position)
    with make_instruction_range(f"{position.stage}F{position.mb}"):
        result = original(*args, **kwargs)
    _tag_tensors(result[0], position)
    return result


def _run_backward(original: Any, *args: Any, **kwargs: Any) -> Any:
    if _CURRENT_STEP.get() is None:
        return original(*args, **kwargs)
    arguments = signature(original).bind(*args, **kwargs).arguments
    position = _read_tag(arguments["output_tensor"])
    _require_tag(arguments["output_tensor_grad"], position)
    with make_instruction_range(f"{position.stage}B{position.mb}"):
        gradient = original(*args, **kwargs)
    _tag_tensors(gradient, position)
    return gradient


def _reduce_gradients(original: Any, stages: range, *args: Any, **kwargs: Any) -> Any:
    """Reduce the gradients of all stages of the rank in one call, inside one range per stage."""
    with open_reduction_ranges(stages):
        return original(*args, **kwargs)


# ---------------------------------------------------------------- messages


def _post_batch(original: Any, **kwargs: Any) -> Any:
    """Post messages as a batch, in a range."""
    step = _CURRENT_STEP.get()
    actions = _name_messages(step, kwargs)
    if not actions:
        return original(**kwargs)
    with make_posting_range([*actions.values()]):
        works = original(**kwargs)
    return wrap_works(works, [*actions.values()])


def _post_one_by_one(original: Any, **kwargs: Any) -> Any:
    """Post messages one after the other, each in a range. `_p2p_ops` chooses the order."""
    actions = _name_messages(_CURRENT_STEP.get(), kwargs)
    if not actions:
        return original(**kwargs)
    # Id of a tensor -> name of its message.
    names = {id(kwargs[f"tensor_{direction}"]): action for direction, action in actions.items()}

    def post_in_range(function: Any, tensor: Any, **options: Any) -> Any:
        with make_instruction_range(names.pop(id(tensor))):
            return function(tensor, **options)

    patched_distributed = _Distributed(
        isend=partial(post_in_range, distributed.isend),
        irecv=partial(post_in_range, distributed.irecv),
    )
    patched_globals = original.__globals__ | {
        "torch": SimpleNamespace(distributed=patched_distributed)
    }
    works = FunctionType(original.__code__, patched_globals, closure=original.__closure__)(**kwargs)
    if names:
        raise ExecutionError(
            "Megatron sends messages with functions that schedir does not know", hint=_HINT
        )
    return {
        direction: PostedMessages([work], [actions[direction]]) for direction, work in works.items()
    }


class _Distributed(SimpleNamespace):
    """The module torch.distributed, with some functions replaced."""

    def __getattr__(self, name: str) -> Any:
        return getattr(distributed, name)


def _name_messages(step: _MegatronStep | None, arguments: dict[str, Any]) -> dict[str, str]:
    """Return the names of the messages of a call, by direction, in the order of its parameters."""
    directions = ("send_prev", "recv_prev", "send_next", "recv_next")
    if step is None:
        return {}
    tensors = {direction: arguments[f"tensor_{direction}"] for direction in directions}
    return {
        direction: step.name_message(direction, tensor)
        for direction, tensor in tensors.items()
        if tensor is not None
    }


# ---------------------------------------------------------------- tags of tensors


def _list_tensors(value: Any) -> list[Any]:
    tensors = value if isinstance(value, list) else [value]
    return [tensor for tensor in tensors if tensor is not None]


def _tag_tensors(value: Any, position: _MessageStage) -> None:
    for tensor in _list_tensors(value):
        setattr(tensor, _POSITION_ATTRIBUTE, position)


def _read_tag(value: Any) -> _MessageStage:
    """Return the stage and microbatch of a tensor that a forward or backward has returned."""
    tags = [getattr(tensor, _POSITION_ATTRIBUTE, None) for tensor in _list_tensors(value)]
    if not tags or not isinstance(tags[0], _MessageStage):
        raise ExecutionError("Megatron sends a tensor that no forward_step returned", hint=_HINT)
    return tags[0]


def _require_tag(value: Any, position: _MessageStage) -> None:
    """Raise ExecutionError if a received tensor is not the input of this forward or backward."""
    for tensor in _list_tensors(value):
        tag = getattr(tensor, _POSITION_ATTRIBUTE, position)
        if tag != position:
            raise ExecutionError(
                f"Megatron computes stage {position.stage} of microbatch {position.mb} with a "
                f"tensor that it received for stage {tag.stage} of microbatch {tag.mb}",
                hint=_HINT,
            )
