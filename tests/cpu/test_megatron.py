"""Tests of `schedir.megatron`, which runs programs of schedir in place of Megatron's schedules.

Losses and all `main_grad`s after two steps, or five with ALL_CASES=1, are bitwise equal to those of
Megatron's schedule.
"""

from __future__ import annotations

import runpy
from contextlib import redirect_stdout
from dataclasses import replace
from functools import cache, partial
from io import StringIO
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import register_parametrization

from schedir import B, F, I, Opcode, W, compile, to_text
from schedir.errors import SchedirError
from schedir.transports.local_processes import run_processes
from tests.cases import ALL, cases
from tests.cpu import megatron_gpt
from tests.cpu.megatron_gpt import (
    Case,
    build_chunks,
    compare,
    interleaved_with_crossed_messages,
    megatron_on_cpu,
    run_step,
    train,
)
from tests.cpu.megatron_on_cpu import import_megatron, skip_without_megatron
from tests.cpu.train_command import ROOT
from tests.cpu.trainer_traces import import_traces, profile_step

skip_without_megatron()


@pytest.fixture(scope="module", autouse=True)
def _megatron() -> None:
    """Import Megatron in this process, so that its forks have it loaded."""
    import_megatron()


EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_aux_loss_coeff": 1e-2,
    "moe_router_load_balancing_type": "aux_loss",
    "add_bias_linear": False,
    "moe_token_dispatcher_type": "alltoall",
}
BF16: dict[str, Any] = {
    "bf16": True,
    "pipeline_dtype": torch.bfloat16,
    "params_dtype": torch.bfloat16,
    "deallocate_pipeline_outputs": True,
}
RECOMPUTE: dict[str, Any] = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
PARTIAL: dict[str, Any] = {"num_microbatches_with_partial_activation_checkpoints": 1}
PER_TOKEN: dict[str, Any] = {"calculate_per_token_loss": True}
SEQUENCE: dict[str, Any] = {"sequence_parallel": True}
SHORT = Case(layers=2)
LOOP = Case(chunks=2, tied=False)
VEE = replace(LOOP, is_vee=True)
PROFILED = dict(cases([("zb_v", VEE)], [("interleaved_zb", LOOP)]))
LENGTHS = Case(
    lengths=(16, 4, 12, 8),
    settings={"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"},
)
FUSED: dict[str, Any] = {"gradient_accumulation_fusion": True}
DEFERRED_OUTPUT: dict[str, Any] = {"defer_embedding_wgrad_compute": True, "wgrad_deferral_limit": 3}
DELAYED = Case(layers=2, linears="delayed", settings=FUSED, ddp={"overlap_grad_reduce": True})
DELAYED_EXPERTS = Case(layers=2, linears="delayed", settings=EXPERTS)
DISTRIBUTED = {"overlap_grad_reduce": True, "use_distributed_optimizer": True}


def weights_last(rank: int, ranks: int, microbatches: int) -> Any:
    """Yield a user's schedule that defers all weight gradients to the end."""
    lead = min(ranks - 1 - rank, microbatches)
    yield lead * F + (microbatches - lead) * (F + I) + lead * I + microbatches * W


def half_split(rank: int, ranks: int, microbatches: int) -> Any:
    """Yield a user's schedule that splits the last backwards only, and defers their W."""
    split = microbatches // 2
    yield microbatches * F + (microbatches - split) * B + split * I + split * W


# The schedule and the case of each run, by number of processes.
# Runs without a pipeline are last, because Megatron's process groups change.
RUNS: dict[int, dict[str, tuple[Any, Case]]] = {
    2: {
        "own": (f"{ROOT}/examples/mine.py:in_pairs", SHORT),
        "zb_v-per-token": ("zb_v", replace(VEE, settings=PER_TOKEN)),
        "experts": ("zb_h1", replace(SHORT, settings=EXPERTS | PER_TOKEN)),
        "bf16-recompute": ("zb_h1", replace(SHORT, settings=BF16 | RECOMPUTE)),
        "frozen": ("zb_h1", Case(tied=False, frozen=("embedding", "linear_fc1", "layers.0"))),
        "lengths-interleaved": ("interleaved", replace(LENGTHS, chunks=2)),
        "delayed": (half_split, DELAYED),
        "delayed-experts": ("zb_h1", DELAYED_EXPERTS),
        "deferred-output": ("zb_h1", replace(DELAYED, settings=FUSED | DEFERRED_OUTPUT, ddp={})),
        "evaluation": ("zb_h1", replace(SHORT, forward_only=True)),
        "pp1-dp2": ("zb_h1", replace(SHORT, pp=1, ddp={"overlap_grad_reduce": True})),
        "pp1-tp2": ("zb_h1", replace(SHORT, pp=1, tp=2)),
        "pp1-tp2-sequence": ("zb_h1", replace(SHORT, pp=1, tp=2, settings=SEQUENCE)),
    },
    4: {"dp2-sharded": ("interleaved_zb", Case(chunks=2, ddp=DISTRIBUTED, aligned=True))},
}

# Faster tests fail for the same mistakes: the runs above, and the test of looped ranks.
if ALL:
    RUNS[2] = {
        "zb_h1": ("zb_h1", Case()),
        "1f1b": ("one_f_one_b", Case()),
        "bf16": ("zb_h1", Case(settings=BF16)),
        "recompute": ("zb_h1", Case(settings=RECOMPUTE)),
        "gpipe": ("gpipe", Case()),
        "interleaved": ("interleaved", Case(chunks=2)),
        "interleaved_zb": ("interleaved_zb", LOOP),
        "looped_bfs": ("looped_bfs", LOOP),
        "zb_v": ("zb_v", VEE),
        "dualpipe_v": ("dualpipe_v", VEE),
        "own-split": (weights_last, Case()),
        "uneven": ("zb_h1", Case(settings={"num_layers_in_first_pipeline_stage": 1})),
        "layout": ("zb_h1", Case(settings={"pipeline_model_parallel_layout": "Et|tttL"})),
        "lengths": ("one_f_one_b", LENGTHS),
        "lengths-zb_v": ("zb_v", replace(LENGTHS, chunks=2, tied=False, is_vee=True)),
        "lengths-evaluation": ("zb_h1", replace(LENGTHS, forward_only=True)),
        "delayed-1f1b": ("one_f_one_b", DELAYED),
        "delayed-recompute": ("zb_h1", replace(DELAYED, settings=RECOMPUTE)),
        "delayed-zb_v": (
            "zb_v",
            replace(DELAYED_EXPERTS, layers=4, chunks=2, tied=False, is_vee=True),
        ),
    } | RUNS[2]
    RUNS[2]["pp1-tied"] = "zb_h1", Case(pp=1)
    RUNS[4] |= {
        "pp4": ("zb_h1", Case(pp=4, microbatches=8)),
        "pp4-1f1b": ("one_f_one_b", Case(pp=4, microbatches=8)),
        "pp4-interleaved": ("interleaved", replace(LOOP, pp=4, layers=8, microbatches=8)),
        "pp4-lengths": ("interleaved", replace(LENGTHS, pp=4, chunks=2, layers=8)),
        "pp4-zb_v": ("zb_v", replace(VEE, pp=4, layers=8, microbatches=8)),
        "dp2": ("zb_h1", Case(ddp={"overlap_grad_reduce": True})),
        "dp2-aligned": ("zb_h1", Case(ddp={"overlap_grad_reduce": True}, aligned=True)),
        "dp2-1f1b": ("one_f_one_b", Case(tied=False, ddp=DISTRIBUTED)),
        "dp2-zb_v": ("zb_v", replace(VEE, ddp=DISTRIBUTED)),
        "dp2-delayed": ("zb_h1", replace(DELAYED, ddp=DISTRIBUTED)),
        "tp2": ("zb_h1", Case(tp=2)),
        "tp2-sequence": ("zb_h1", Case(tp=2, settings=SEQUENCE)),
    }


# Forks of this process have Megatron loaded. A new process would need a second to load it.
start_forks = partial(run_processes, context=get_context("fork"), timeout=1200 if ALL else 240)


@cache
def run_forks(processes: int) -> dict[str, list[Any]]:
    """Return the results of all runs with this number of processes, by name and rank.

    One start of the processes serves all tests, because it takes longer than most of them.
    """
    per_process = start_forks(run_in_process, processes)
    return {name: [results[name] for results in per_process] for name in per_process[0]}


def run_in_process(rank: int) -> dict[str, Any]:
    """Return the results of the runs of this process, by name."""
    processes = dist.get_world_size()
    results: dict[str, Any] = {}
    if processes == 2:
        results["wrong"] = fail_all(rank, [run[:3] for run in WRONG.values()])
        results |= {probe.__name__: probe() for probe in PROBES}
    return results | {
        name: compare(replace(case, steps=5) if ALL else case, schedule)
        for name, (schedule, case) in RUNS[processes].items()
    }


@pytest.mark.parametrize(
    ("processes", "name"), [(processes, name) for processes, runs in RUNS.items() for name in runs]
)
def test_losses_and_gradients_equal_megatron(processes: int, name: str) -> None:
    case = RUNS[processes][name][1]
    with_losses = range(processes - processes // case.pp, processes)
    for rank, result in enumerate(run_forks(processes)[name]):
        assert not result.wrong
        assert result.gradients >= 10 or case.forward_only
        assert len(result.losses) == (5 if ALL else 2) * case.microbatches
        # In a vee the first pipeline rank has the last stage, while Megatron expects losses on the
        # last one.
        has_losses = rank in with_losses or (case.is_vee and rank < processes // case.pp)
        assert result.own_losses == (result.losses if has_losses else [])


def compare_with_file() -> Any:
    """Run a program file, and compare it with Megatron's schedule."""
    program = compile("zb_h1", ranks=2, microbatches=4, progress_model="per_edge")
    with TemporaryDirectory() as folder:
        path = Path(folder, "program.sched")
        path.write_text(to_text(program))
        return compare(Case(), str(path))


def test_program_file_equals_megatron() -> None:
    for result in run_forks(2)[compare_with_file.__name__]:
        assert result.gradients >= 10 and not result.wrong


def test_delayed_gradients_are_computed_in_w() -> None:
    """Each linear stores the gradients of two `I`."""
    assert [result.max_stored for result in run_forks(2)["delayed"]] == [2, 2]


def forwards_in_descending_order(rank: int, ranks: int, microbatches: int) -> Any:
    order = [*reversed(range(microbatches))]
    for mb in order:
        yield F.at(mb)
    for mb in order:
        yield B.at(mb)


def fail_all(rank: int, runs: list[tuple[Any, Case, dict[str, Any]]]) -> list[str]:
    """Return the messages of the runs' errors. Each run fails in every process."""
    import schedir.megatron

    errors = []
    for schedule, case, arguments in runs:
        local_schedule = schedule[rank] if isinstance(schedule, list) else schedule
        with megatron_on_cpu(case), pytest.raises(SchedirError) as caught:
            step = partial(schedir.megatron.forward_backward(local_schedule), **arguments)
            provider = partial(schedir.megatron.model_provider, schedule=local_schedule)
            train(case, step, provider if case.is_vee else lambda build: build)
        errors.append(str(caught.value))
    return errors


WRONG: dict[str, tuple[Any, Case, dict[str, Any], str]] = {
    "loop": ("zb_v", LOOP, {}, "is stage 2 of zb_v, so post_process must be False, but it is True"),
    "chunks": ("one_f_one_b", LOOP, {}, "does not run the 2 model chunks"),
    "microbatches": (compile("gpipe", ranks=2, microbatches=8), Case(), {}, "8 microbatches"),
    "dp": (compile("gpipe", ranks=2, microbatches=4, dp=2), Case(), {}, "dp 2"),
    "replicas": ("dualpipe", LOOP, {}, "several ranks"),
    "tied": ("zb_v", replace(VEE, tied=True), {}, "share_embeddings_and_output_weights"),
    "order": (forwards_in_descending_order, Case(), {}, "ascending order"),
    "shapes": ("gpipe", Case(), {"adjust_tensor_shapes_fn": max}, "adjust_tensor_shapes_fn"),
    "setting": ("gpipe", Case(settings=PARTIAL), {}, "num_microbatches_with_partial"),
    "crossed": (interleaved_with_crossed_messages(), Case(chunks=2), {}, "wait for each other"),
    "ranks": (["gpipe", "one_f_one_b"], Case(), {}, "the program is"),
}


def test_wrong_runs_raise_same_error_on_all_ranks() -> None:
    for name, *errors in zip(WRONG, *run_forks(2)["wrong"], strict=True):
        assert errors[0] == errors[1], name
        assert WRONG[name][3] in errors[0], (name, errors[0])


def profile_steps(rank: int, folder: str) -> None:
    """Save the trace of a step of each of PROFILED."""
    import schedir.megatron

    for name, case in PROFILED.items():
        with megatron_on_cpu(case):
            provider = partial(schedir.megatron.model_provider, schedule=name)
            chunks = build_chunks(case, provider if case.is_vee else lambda build: build)
            step = schedir.megatron.forward_backward(name)
            run_step(case, step, chunks, 0)
            profile_step(partial(run_step, case, step, chunks, 1), f"{folder}/{name}-{rank}.json")


def test_imported_trace_is_program_of_step(tmp_path: Path) -> None:
    start_forks(profile_steps, 2, str(tmp_path))
    for name, case in PROFILED.items():
        imported = import_traces(tmp_path, name)
        program = compile(
            name,
            ranks=case.pp,
            microbatches=case.microbatches,
            stages_per_rank=case.chunks,
            progress_model="per_edge",
        )
        own_ops = {Opcode.ReduceGrads, Opcode.OptimizerStep}  # Megatron runs them at the end
        for stream, expected in zip(imported.streams, program.streams, strict=True):
            assert [instr for instr in stream if instr.op not in own_ops] == [
                instr for instr in expected if instr.op not in own_ops
            ]
            reduced = [instr.stage for instr in stream if instr.op == Opcode.ReduceGrads]
            assert len(reduced) == case.chunks


def read_error(call: Any) -> str:
    """Return the message of the error that a call raises."""
    with pytest.raises(SchedirError) as caught:
        call()
    return str(caught.value)


def refuse_later_calls() -> list[str]:
    """Return the errors of calls after a first successful one."""
    from megatron.core.parallel_state import get_data_parallel_group

    import schedir.megatron

    step = schedir.megatron.forward_backward("zb_v")
    with megatron_on_cpu(VEE):
        provider = partial(schedir.megatron.model_provider, schedule="zb_v")
        chunks = build_chunks(VEE, provider)
        run_step(VEE, step, chunks, 0)
        with_function = partial(step, adjust_tensor_shapes_fn=max)

        def wrap(chunk: Any) -> Any:
            return DistributedDataParallel(chunk.module, process_group=get_data_parallel_group())

        def with_one_iterator(data_iterator: list[Any], **call: Any) -> Any:
            return step(data_iterator=data_iterator[0], **call)

        return [
            read_error(partial(run_step, VEE, with_function, chunks, 0)),
            read_error(partial(run_step, VEE, with_one_iterator, chunks, 0)),
            read_error(partial(run_step, VEE, step, build_chunks(LOOP, lambda build: build), 0)),
            read_error(partial(run_step, VEE, step, [*map(wrap, chunks)], 0)),
        ]


def refuse_hook_on_delayed_weight() -> str:
    """Return the error of a step if a weight with delayed gradients has a gradient hook."""
    import schedir.megatron

    step = schedir.megatron.forward_backward("gpipe")
    with megatron_on_cpu(DELAYED):
        chunks = build_chunks(DELAYED, lambda build: build)
        weights = [p for p in chunks[0].parameters() if hasattr(p, "skip_backward_post_hook")]
        weights[0].register_hook(abs)
        return read_error(partial(run_step, DELAYED, step, chunks, 0))


def test_gradient_hook_on_delayed_weight_is_refused() -> None:
    for error in run_forks(2)[refuse_hook_on_delayed_weight.__name__]:
        assert "a weight of DelayedLinear has a gradient hook" in error


def test_later_calls_check_arguments_and_model() -> None:
    for errors in run_forks(2)[refuse_later_calls.__name__]:
        assert "adjust_tensor_shapes_fn is not supported" in errors[0]
        assert "need 2 data iterators, but data_iterator has 1" in errors[1]
        assert "is stage 2 of zb_v, so post_process must be False, but it is True" in errors[2]
        assert "torch's DDP is not supported" in errors[3]


def count_hook_calls() -> tuple[bool, int, int]:
    """Return whether gradients with hooks equal Megatron's, and both schedules' hook calls."""
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    import schedir.megatron

    case, calls = Case(), []

    def count_and_double(gradient: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return gradient * 2

    with megatron_on_cpu(case):
        chunks = build_chunks(case, lambda build: build)
        for name, module in [*chunks[0].named_modules()]:
            if name.endswith("linear_qkv"):  # its weight is a function of the parameter
                register_parametrization(module, "weight", nn.Tanh())
        for name, parameter in chunks[0].named_parameters():
            if name.endswith("linear_fc1.weight"):
                parameter.register_hook(count_and_double)
            if name.endswith("linear_fc2.weight"):
                parameter.register_post_accumulate_grad_hook(lambda _: calls.append(1))
        counts, gradients = [], []
        for step in (schedir.megatron.forward_backward("zb_h1"), get_forward_backward_func(2)):
            calls.clear()
            chunks[0].zero_grad_buffer()
            run_step(case, step, chunks, 0)
            counts.append(len(calls))
            gradients.append([parameter.main_grad.clone() for parameter in chunks[0].parameters()])
    return all(map(torch.equal, *gradients)), counts[0], counts[1]


def test_gradient_hooks_are_called_as_in_megatron() -> None:
    for is_equal, own_calls, calls in run_forks(2)[count_hook_calls.__name__]:
        assert is_equal and own_calls == calls > 0


def step_after_failed_step() -> list[str]:
    """Return errors after a step that failed before the end of its reduction.

    The first error is that of the same function, and the second that of another function.
    """
    from megatron.core.utils import get_model_config

    import schedir.megatron

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError

    case, step = Case(ddp={"overlap_grad_reduce": True}), schedir.megatron.forward_backward("gpipe")
    with megatron_on_cpu(case):
        chunks = build_chunks(case, lambda build: build)
        config: Any = get_model_config(chunks[0])
        finalize, config.finalize_model_grads_func = config.finalize_model_grads_func, fail
        with pytest.raises(ValueError):
            run_step(case, step, chunks, 0)
        config.finalize_model_grads_func = finalize
        chunks[0].zero_grad_buffer()
        other = schedir.megatron.forward_backward("gpipe")
        return [read_error(partial(run_step, case, f, chunks, 0)) for f in (step, other)]


def test_step_after_failed_step_is_refused() -> None:
    for same, other in run_forks(2)[step_after_failed_step.__name__]:
        assert "this rank failed in an earlier step" in same
        assert "an earlier step has not ended" in other


def collect_arrays() -> list[Any]:
    """Return what evaluations of a vee return if the loss function reports arrays or objects."""
    import schedir.megatron

    def forward(data: Any, model: Any) -> Any:
        tokens, labels, _, mask, positions = next(data)
        output = model(tokens, positions, mask, labels=labels)
        return output, lambda losses, non_loss_data: convert(losses.detach().numpy())

    step = partial(schedir.megatron.forward_backward("zb_v"), collect_non_loss_data=True)
    with megatron_on_cpu(VEE), patch.object(megatron_gpt, "forward_step", forward):
        chunks = build_chunks(VEE, partial(schedir.megatron.model_provider, schedule="zb_v"))
        convert: Any = np.asarray
        arrays = run_step(replace(VEE, forward_only=True), step, chunks, 0)
        convert = iter  # an object that cannot be sent
        error = read_error(lambda: run_step(replace(VEE, forward_only=True), step, chunks, 0))
        return [arrays, error]


def test_vee_returns_arrays_on_last_rank() -> None:
    (first, first_error), (last, last_error) = run_forks(2)[collect_arrays.__name__]
    assert first_error == last_error and "reports a value that cannot be sent" in last_error
    assert len(last) == VEE.microbatches
    assert [array.tolist() for array in first] == [array.tolist() for array in last]


def find_wrong_checkpoint_keys() -> list[set[str]]:
    """Return by chunk of a vee the keys that differ between state dict and sharded state dict."""
    from megatron.core import parallel_state

    import schedir.megatron

    with megatron_on_cpu(VEE):
        chunks = build_chunks(VEE, partial(schedir.megatron.model_provider, schedule="zb_v"))
        metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(True)}
        modules = [chunk.module for chunk in chunks]
        differences = [m.state_dict().keys() ^ m.sharded_state_dict(metadata=metadata).keys()
                       for m in modules]  # fmt: skip
        return [{key for key in keys if "_extra_state" not in key} for keys in differences]


def exchange_shapes() -> list[tuple[int, ...]]:
    """Return the shapes that this process receives through a group for shapes only."""
    from megatron.core import parallel_state

    from schedir.megatron.pipeline_transport import PipelineGroupTransport

    with megatron_on_cpu(Case()):
        group = parallel_state.get_pipeline_model_parallel_group()
        transport = PipelineGroupTransport(group, torch.device("cpu"))
        assert transport.shape_group is group
        transport.shape_group = None  # as with NCCL
        transport.create_shape_group([(0, 1)])
        assert transport.shape_group is not group
        rank = group.rank()
        sends = [transport.send_shape((rank, mb, 3), 1 - rank) for mb in range(2)]
        shapes = [transport.receive_shape(1 - rank) for _ in sends]
        for message, _ in sends:
            message.wait()
        return shapes


def test_shapes_are_received_in_order_of_sends() -> None:
    for rank, shapes in enumerate(run_forks(2)[exchange_shapes.__name__]):
        assert shapes == [(1 - rank, mb, 3) for mb in range(2)]


def record_param_syncs() -> list[list[str]]:
    """Return the calls of `param_sync_func` and of the chunks, for ours, Megatron's, evaluation."""
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.utils import get_model_config

    import schedir.megatron

    calls: list[str] = []

    def sync(chunk: int, parameters: Any) -> None:
        assert next(iter(parameters)) is next(chunks[chunk].parameters())
        calls.append(f"sync {chunk}")

    own = schedir.megatron.forward_backward("interleaved")
    with megatron_on_cpu(LOOP):
        chunks = build_chunks(LOOP, lambda build: build)
        config: Any = get_model_config(chunks[0])
        config.param_sync_func = [partial(sync, number) for number in range(2)]
        for number, chunk in enumerate(chunks):
            chunk.register_forward_pre_hook(lambda *_, n=number: calls.append(f"F {n}"))
        results = []
        for step in (own, get_forward_backward_func(2, 2)):
            run_step(LOOP, step, chunks, 0)
            results.append(calls.copy())
            calls.clear()
        run_step(replace(LOOP, forward_only=True), own, chunks, 0)
        return [*results, calls]


def test_param_sync_func_is_called_as_in_megatron() -> None:
    for own, megatron, evaluation in run_forks(2)[record_param_syncs.__name__]:
        assert own == megatron
        assert own[:3] == ["sync 0", "sync 1", "F 0"] and evaluation == own[2:]


def build_delayed_config() -> bool:
    """Return `delay_wgrad_compute` of a configuration that a model provider creates."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    import schedir.megatron

    def build(**_: Any) -> Any:
        return TransformerConfig(
            num_layers=2, hidden_size=8, num_attention_heads=1, delay_wgrad_compute=True
        )

    with megatron_on_cpu(Case()):
        with pytest.raises(AssertionError, match="overlap_moe_expert_parallel_comm"):
            build()
        config = schedir.megatron.model_provider(build, "zb_h1")()
        return bool(config.delay_wgrad_compute)


def test_model_provider_accepts_delayed_weight_gradients() -> None:
    assert run_forks(2)[build_delayed_config.__name__] == [True, True]


def run_example() -> list[str]:
    """Return what examples/megatron_gpt.py prints with a schedule of schedir, and with Megatron's.

    Both runs start from the same weights.
    """
    example = runpy.run_path(str(ROOT / "examples" / "megatron_gpt.py"))
    outputs = []
    with megatron_on_cpu(Case()):
        for schedule in ("zb_h1", "megatron"):
            torch.manual_seed(dist.get_rank())
            with redirect_stdout(StringIO()) as output:
                example["train"](schedule)
            outputs.append(output.getvalue())
    return outputs


def test_example_prints_losses_of_megatron() -> None:
    first, last = run_forks(2)[run_example.__name__]
    assert first == ["", ""]
    assert last[0] == last[1] and last[0].count("loss") == 5


PROBES: tuple[Any, ...] = (
    compare_with_file,
    record_param_syncs,
    build_delayed_config,
    run_example,
    exchange_shapes,
    refuse_later_calls,
    refuse_hook_on_delayed_weight,
    count_hook_calls,
    step_after_failed_step,
    collect_arrays,
    find_wrong_checkpoint_keys,
)


def test_distributed_checkpoint_of_vee_has_layer_names() -> None:
    assert run_forks(2)[find_wrong_checkpoint_keys.__name__] == [[set(), set()]] * 2
