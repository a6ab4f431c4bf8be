"""A replacement of Megatron's `forward_backward_func` that runs a schedule of schedir."""

from __future__ import annotations

import codecs
import io
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pickle import PickleError
from typing import Any, Final
from warnings import warn
from weakref import ref

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from schedir.errors import ExecutionError, ModelError
from schedir.ir.program import Program
from schedir.megatron.delayed_weight_gradients import (
    DelayedModules,
    find_delayed_modules,
    require_delay_settings,
)
from schedir.megatron.pipeline_transport import PipelineGroupTransport
from schedir.megatron.run_requirements import (
    ChunkLayout,
    read_layout,
    require_call_arguments,
    require_finished_reductions,
    require_layout,
    require_supported_settings,
)
from schedir.megatron.schedule_compilation import (
    PipelineSetting,
    compile_program,
    has_split_backward,
    load_schedule,
    require_compile_options,
)
from schedir.megatron.step_handlers import HANDLERS, MegatronCall, MegatronStep
from schedir.megatron.vee_model import stage_contexts
from schedir.megatron.weight_gradients import split_linear_backward
from schedir.schedules.schedule_algebra import Schedule
from schedir.transports.rank_agreement import gather_or_raise, require_same

# The objects that `torch.load` may call with `weights_only`, to read NumPy arrays and numbers.
_NUMPY_GLOBALS: Final[list[Any]] = [
    np.ndarray,
    np.dtype,
    codecs.encode,
    np.empty(0).__reduce__()[0],
    np.float64(0).__reduce__()[0],
    *{type(np.dtype(code)) for code in "?bhilqBHILQefdFD"},
]
_SAME_HINT: Final = "give all processes the same schedule and the same arguments"


@dataclass(frozen=True)
class _PreparedRun:
    """A program that all ranks agreed on, and the transport of its messages."""

    program: Program
    transport: PipelineGroupTransport


class ForwardBackward:
    """Runs a schedule in the place of Megatron's `forward_backward_func`. See `forward_backward`.

    Args:
        schedule: See `forward_backward`.
        **options: See `forward_backward`.
    """

    def __init__(self, schedule: str | Schedule | Program, **options: Any) -> None:
        require_compile_options(options)
        self.schedule: Schedule | Program = load_schedule(schedule)
        self.options = options
        # A call with a new key runs the checks in `_prepare`. A key does not contain the sequence
        # length, or other settings of `config` than `variable_seq_lengths`. It refers to the model
        # chunks by weak references.
        self._prepared: dict[Any, _PreparedRun] = {}
        # Pipeline group -> the group that sends its shapes. All ranks create it in the same call.
        self._shape_groups: dict[Any, Any] = {}
        self._has_failed = False

    def __call__(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
        p2p_communicator: Any = None,
        pg_collection: Any = None,
        force_all_reduce: bool = False,
    ) -> list[Any]:
        """Run the forwards and backwards of one step.

        The method has the parameters and the result of Megatron's `forward_backward_func`.

        Args:
            forward_step_func: A function of a data iterator and a model chunk. It returns the
                output and a loss function.
            data_iterator: The data iterator, or a list with an iterator for each model chunk.
            model: The model chunk of this rank, or the list of its chunks.
            num_microbatches: The number of microbatches.
            seq_length: The sequence length of a microbatch, in tokens.
            micro_batch_size: The number of sequences of a microbatch.
            decoder_seq_length: The sequence length of the decoder, if it is not `seq_length`.
            forward_only: True to run forwards only, for evaluation.
            collect_non_loss_data: True to return the outputs of the loss function unchanged.
            first_val_step: True for the first validation step after training steps.
            adjust_tensor_shapes_fn: Not supported.
            p2p_communicator: Not used. schedir sends the messages itself.
            pg_collection: Megatron's process groups. By default the groups of `parallel_state`.
            force_all_reduce: See Megatron's `finalize_model_grads`.

        Returns:
            The data that the loss function returned for each microbatch, on the rank of the last
            stage and on the last pipeline rank. Other ranks get an empty list.

        Raises:
            UsageError: A setting is not supported, or the schedule does not fit the run. All
                ranks raise the same error, before the first message.
            ModelError: A model chunk does not match its stage.
            ExecutionError: An earlier step of this rank failed, or its reductions have not ended.
            SchedirError: The schedule is wrong, or could hang with these process groups.
        """
        if self._has_failed:
            raise ExecutionError(
                "this rank failed in an earlier step, and the messages of that step may be "
                "incomplete",
                hint="restart the processes from a checkpoint",
            )
        chunks = model if isinstance(model, list) else [model]
        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        config: Any = get_model_config(chunks[0])
        groups = pg_collection or _default_groups()
        shape_args = {
            "seq_length": seq_length,
            "micro_batch_size": micro_batch_size,
            "decoder_seq_length": decoder_seq_length,
        }
        has_variable_lengths = bool(config.variable_seq_lengths)
        setting = PipelineSetting(
            groups.pp.size(), len(chunks), num_microbatches, forward_only, has_variable_lengths
        )
        has_shapes_fn = adjust_tensor_shapes_fn is not None
        key = (setting, groups.pp, (*map(ref, chunks),), len(iterators), has_shapes_fn)
        if key not in self._prepared:
            self._prepared = {
                cached_key: run
                for cached_key, run in self._prepared.items()
                if all(chunk() is not None for chunk in cached_key[2])
            }
            call_arguments = (len(iterators), has_shapes_fn)
            self._prepared[key] = self._prepare(
                setting, chunks, config, groups, shape_args, call_arguments
            )
        run = self._prepared[key]
        (boundary_shape,) = schedules.get_tensor_shapes(
            **shape_args, config=config, tp_group=groups.tp, cp_group=groups.cp
        )
        call = MegatronCall(
            forward_step_func,
            iterators,
            chunks,
            config,
            num_microbatches,
            forward_only,
            collect_non_loss_data,
            first_val_step,
            None if has_variable_lengths else tuple(boundary_shape),
            groups.cp.size(),
        )
        try:
            return _run_step(run, call, groups, force_all_reduce)
        except BaseException:
            # Without a pipeline, a step has no messages. A trainer may then run another step.
            self._has_failed = groups.pp.size() > 1
            raise

    def _prepare(
        self,
        setting: PipelineSetting,
        chunks: list[Any],
        config: Any,
        groups: Any,
        shape_args: dict[str, Any],
        call_arguments: tuple[int, bool],
    ) -> _PreparedRun:
        """Compile and check the program. All ranks raise the error of the first rank that fails."""
        prepared_runs: list[_PreparedRun] = []

        def prepare_rank() -> tuple[dict[str, str], list[ChunkLayout], list[int]]:
            require_supported_settings(chunks, config)
            require_call_arguments(len(chunks), *call_arguments)
            if not setting.forward_only:
                require_delay_settings(chunks)
            transport = PipelineGroupTransport(groups.pp, _device_of(chunks))
            program = compile_program(
                self.schedule,
                setting,
                transport.progress_model,
                transport.blocking_hosts,
                self.options,
                HANDLERS,
            )
            if _device_of(chunks).type != "cpu":
                warn(
                    "schedir.megatron has not been run on GPUs yet: compare the losses and the "
                    "gradients of some steps with Megatron's own schedule",
                    stacklevel=2,
                )
            if any(map(find_delayed_modules, chunks)):
                warn(
                    "schedir.megatron has not been run with Transformer Engine yet. It was run "
                    "with modules that delay their weight gradients in the same way. Compare the "
                    "losses and the gradients with those of a run without delay_wgrad_compute",
                    stacklevel=2,
                )
            prepared_runs.append(_PreparedRun(program, transport))
            facts = {
                "the number of microbatches": str(setting.microbatches),
                "the program": f"{program.name} ({program.digest[:12]})",
                "pipeline_dtype": str(config.pipeline_dtype),
                "variable_seq_lengths": str(setting.variable_seq_lengths),
                "the progress model": transport.progress_model,
                **{name: repr(value) for name, value in shape_args.items()},
            }
            pipeline = dist.get_process_group_ranks(groups.pp)
            return facts, [read_layout(chunk) for chunk in chunks], pipeline

        # All processes compare their programs, not only the processes of one pipeline, because
        # tensor-parallel and data-parallel peers issue their collectives in the order of the
        # program.
        results = gather_or_raise(prepare_rank, dist.group.WORLD, (ChunkLayout,))
        for name in results[0][0]:
            require_same(name, [facts[name] for facts, _, _ in results], _SAME_HINT)
        layouts = [results[k][1] for k in dist.get_process_group_ranks(groups.pp)]
        require_layout(prepared_runs[0].program.shape, layouts, prepared_runs[0].program.name)
        if setting.variable_seq_lengths:
            pipelines = sorted({tuple(pipeline) for _, _, pipeline in results})
            transport = prepared_runs[0].transport
            transport.shape_group = transport.shape_group or self._shape_groups.get(groups.pp)
            transport.create_shape_group(pipelines)
            self._shape_groups[groups.pp] = transport.shape_group
        return prepared_runs[0]


def forward_backward(schedule: str | Schedule | Program, **options: Any) -> ForwardBackward:
    """Return a function that replaces the result of Megatron's `get_forward_backward_func()`.

    The schedule is compiled at the first call, for the pipeline size, the number of model chunks
    and the number of microbatches of the call. If one of these changes, it is compiled again.
    Before the first message, schedir proves that the program finishes with Megatron's process
    groups, and all ranks compare their programs. Megatron's own `forward_step` and `backward_step`
    run the forwards and backwards. Losses and gradients are bitwise equal to those of Megatron's
    schedules, with a few exceptions such as dropout (see docs/how-to/run-in-megatron.md). Gradients
    are reduced by Megatron's DistributedDataParallel, and finalized by
    `config.finalize_model_grads_func`.

    A schedule with split backwards (I and W) computes the weight gradients of Megatron's
    ColumnParallelLinear and RowParallelLinear in W. `weight_gradients` lists exceptions. W also
    computes those of modules that were built with `delay_wgrad_compute` (Transformer Engine). I
    computes all other gradients.

    Args:
        schedule: The name of a built-in schedule, "FILE.py:FUNCTION", "FILE.sched", a schedule
            function, or a program.
        **options: Further options of `schedir.compile`, for example `costs`.

    Returns:
        A function with the parameters of Megatron's `forward_backward_func`.

    Raises:
        UsageError: The schedule does not exist, or `compile` does not have one of the options.

    Example:
        In a training script that calls `get_forward_backward_func()` of Megatron-core::

            forward_backward_func = schedir.megatron.forward_backward("zb_h1")
    """
    return ForwardBackward(schedule, **options)


def _run_step(
    run: _PreparedRun, call: MegatronCall, groups: Any, force_all_reduce: bool
) -> list[Any]:
    program, config, chunks = run.program, call.config, call.chunks
    rank = groups.pp.rank()
    last_rank = int(program.shape.first_rank_per_stage[-1])
    is_last = rank == last_rank
    has_backward = not call.forward_only
    needs_finalization = has_backward and config.finalize_model_grads_func is not None
    embedding = None
    if has_backward:
        require_finished_reductions(chunks)
    if needs_finalization:
        embedding = schedules.clear_embedding_activation_buffer(config, chunks, is_last)
    if config.timers is not None:
        config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
    if has_backward and len(chunks) > 1:
        for sync, chunk in zip(_per_chunk(config.param_sync_func, chunks), chunks, strict=True):
            if sync is not None:
                sync(chunk.parameters())
    reduction = _GradientReduction(config, chunks, force_all_reduce, is_last)
    with ExitStack() as stack:
        if has_backward:
            for no_sync in _no_sync_functions(config, chunks):
                stack.enter_context(no_sync())
        if has_split_backward(program):
            stack.enter_context(split_linear_backward())
        delayed_modules = DelayedModules(chunks if has_backward else ())
        stack.enter_context(delayed_modules.record_backwards())
        step = MegatronStep(
            program,
            rank,
            run.transport,
            call,
            delayed_modules,
            reduction,
            stage_contexts(program.shape, rank, groups.pp),
        )
        step.run()
    num_tokens = step.num_tokens
    # Megatron expects the losses and the number of tokens on its last rank.
    if last_rank != program.shape.ranks - 1:
        dist.all_reduce(num_tokens, group=groups.pp)
        _copy_to_last_rank(step.forward_data, last_rank, groups.pp, step.device)
    if needs_finalization:
        schedules.finish_embedding_wgrad_compute(config, embedding, is_last, groups.tp)
        reduction.start_postponed()
        with step.open_reduction_ranges():
            config.finalize_model_grads_func(
                chunks,
                num_tokens if config.calculate_per_token_loss else None,
                pg_collection=groups,
                force_all_reduce=force_all_reduce,
            )
    if config.timers is not None:
        config.timers("forward-backward").stop()
    return step.forward_data


class _GradientReduction:
    """Starts the reduction of a chunk's gradients, after its last weight gradient.

    Without `overlap_grad_reduce`, Megatron reduces all gradients at the end, in
    `finalize_model_grads_func`. With `defer_embedding_wgrad_compute`, Megatron computes gradients
    of the output layer after the last backward. So the reduction of the last stage starts after
    these gradients.
    """

    def __init__(
        self, config: Any, chunks: list[Any], force_all_reduce: bool, has_last_stage: bool
    ) -> None:
        self.chunks = chunks
        self.force_all_reduce = force_all_reduce
        self.sync_functions = _per_chunk(config.grad_sync_func, chunks)
        is_deferred = has_last_stage and config.defer_embedding_wgrad_compute
        self.postponed_chunk = len(chunks) - 1 if is_deferred else None

    def __call__(self, chunk: int) -> None:
        """Start the reduction of a chunk, if it is not postponed."""
        if chunk != self.postponed_chunk:
            self._start(chunk)

    def start_postponed(self) -> None:
        """Start the reduction that was postponed, if any."""
        if self.postponed_chunk is not None:
            self._start(self.postponed_chunk)

    def _start(self, chunk: int) -> None:
        model, sync = self.chunks[chunk], self.sync_functions[chunk]
        if sync is not None:
            sync(model.parameters())
        elif _overlaps_reduction(model):
            for bucket_group in model.bucket_groups + model.expert_parallel_bucket_groups:
                bucket_group.start_grad_sync(force_all_reduce=self.force_all_reduce)


def _overlaps_reduction(chunk: Any) -> bool:
    return bool(getattr(getattr(chunk, "ddp_config", None), "overlap_grad_reduce", False))


def _no_sync_functions(config: Any, chunks: list[Any]) -> list[Any]:
    """Return functions whose contexts keep gradient hooks from starting a reduction."""
    function = config.no_sync_func
    if function is None:
        return [chunk.no_sync for chunk in chunks if _overlaps_reduction(chunk)]
    return function if isinstance(function, list) else [function]


def _per_chunk(function: Any, chunks: list[Any]) -> list[Any]:
    """Return a list with a function or None for each chunk.

    If `function` is a list, it is returned.
    """
    return function if isinstance(function, list) else [function] * len(chunks)


def _copy_to_last_rank(
    forward_data: list[Any], source: int, group: Any, device: torch.device
) -> None:
    """Copy the losses of the rank with the last stage to the device of the last pipeline rank.

    `forward_data` may contain tensors, NumPy arrays, numbers and strings, in lists, tuples and
    dictionaries. For other values, both ranks raise a ModelError.
    """
    last_rank = group.size() - 1
    if group.rank() == source:
        file = io.BytesIO()
        try:
            torch.save(forward_data, file)
            _load_losses(file.getvalue(), device)
        except (PickleError, AttributeError, TypeError):
            # After a size of 0, the last rank raises the same error.
            dist.send(torch.tensor([0], device=device), group=group, group_dst=last_rank)
            raise _make_report_error() from None
        content = torch.frombuffer(file.getbuffer(), dtype=torch.uint8).to(device)
        dist.send(torch.tensor([len(content)], device=device), group=group, group_dst=last_rank)
        dist.send(content, group=group, group_dst=last_rank)
    elif group.rank() == last_rank:
        size = torch.zeros(1, dtype=torch.int64, device=device)
        dist.recv(size, group=group, group_src=source)
        if not size:
            raise _make_report_error()
        content = torch.empty(int(size), dtype=torch.uint8, device=device)
        dist.recv(content, group=group, group_src=source)
        forward_data.extend(_load_losses(content.cpu().numpy().tobytes(), device))


def _load_losses(content: bytes, device: torch.device) -> Any:
    """Read losses from another rank. NumPy arrays are the only objects besides those of torch."""
    with torch.serialization.safe_globals(_NUMPY_GLOBALS):
        return torch.load(io.BytesIO(content), map_location=device, weights_only=True)


def _make_report_error() -> ModelError:
    return ModelError(
        "the loss function reports a value that cannot be sent to the last pipeline rank",
        hint="report tensors, NumPy arrays, numbers and strings, in lists, tuples and dictionaries",
        fields=["forward_step_func"],
    )


def _device_of(chunks: list[Any]) -> torch.device:
    parameter = next(chunks[0].parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


def _default_groups() -> Any:
    groups = ProcessGroupCollection()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.cp = parallel_state.get_context_parallel_group()
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    groups.dp_cp = parallel_state.get_data_parallel_group(
        with_context_parallel=True, partial_data_parallel=False
    )
    return groups
