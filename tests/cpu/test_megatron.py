"""`schedir.megatron`: programs of schedir in the place of Megatron's own schedules.

Losses and all `main_grad`s after two steps have the bits of Megatron's schedule.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch

from schedir import B, F, compile
from schedir.errors import SchedirError, UsageError
from tests.cpu import spawn
from tests.cpu.megatron_gpt import Case, Comparison, compare_all, megatron_on_cpu, train

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

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
LOOP = Case(chunks=2, tied=False)
VEE = replace(LOOP, is_vee=True)
DISTRIBUTED = {"overlap_grad_reduce": True, "use_distributed_optimizer": True}


def in_pairs(rank: int, ranks: int, microbatches: int) -> Any:
    """A schedule of a user: two forwards, then two backwards."""
    lead = min(2 * (ranks - 1 - rank), microbatches)
    yield lead * F
    for _ in range((microbatches - lead) // 2):
        yield 2 * F + 2 * B
    yield (microbatches - lead) % 2 * (F + B) + lead * B


# By number of processes: the schedule and the case of each run.
RUNS: dict[int, dict[str, tuple[Any, Case]]] = {
    2: {
        "1f1b": ("one_f_one_b", Case()),
        "gpipe": ("gpipe", Case()),
        "zb_h1": ("zb_h1", Case()),
        "own": (in_pairs, Case()),
        "interleaved": ("interleaved", Case(chunks=2)),
        "interleaved_zb": ("interleaved_zb", LOOP),
        "zb_v": ("zb_v", VEE),
        "zb_v-per-token": ("zb_v", replace(VEE, settings=PER_TOKEN)),
        "dualpipe_v": ("dualpipe_v", VEE),
        "experts": ("zb_h1", Case(settings=EXPERTS | PER_TOKEN)),
        "bf16": ("zb_h1", Case(settings=BF16)),
        "recompute": ("zb_h1", Case(settings=RECOMPUTE)),
        "frozen": ("zb_h1", Case(tied=False, frozen=("embedding", "linear_fc1", "layers.0"))),
        "uneven": ("zb_h1", Case(settings={"num_layers_in_first_pipeline_stage": 1})),
        "evaluation": ("zb_h1", Case(forward_only=True)),
    },
    4: {
        "pp4": ("zb_h1", Case(pp=4)),
        "pp4-zb_v": ("zb_v", replace(VEE, pp=4, layers=8)),
        "dp2": ("zb_h1", Case(ddp={"overlap_grad_reduce": True})),
        "dp2-aligned": ("zb_h1", Case(ddp={"overlap_grad_reduce": True}, aligned=True)),
        "dp2-sharded": ("interleaved_zb", Case(chunks=2, ddp=DISTRIBUTED)),
        "tp2": ("zb_h1", Case(tp=2)),
        "tp2-sequence": ("zb_h1", Case(tp=2, settings={"sequence_parallel": True})),
    },
}


@cache
def run_all(processes: int) -> dict[str, list[Comparison]]:
    """The runs with this number of processes: starting processes takes longer than the runs."""
    runs = RUNS[processes]
    per_process = spawn.run(compare_all, processes, [*runs.values()])
    return dict(zip(runs, map(list, zip(*per_process, strict=True)), strict=True))


@pytest.mark.parametrize(
    ("processes", "name"), [(processes, name) for processes, runs in RUNS.items() for name in runs]
)
def test_same_bits_as_megatron(processes: int, name: str) -> None:
    case = RUNS[processes][name][1]
    with_losses = range(processes - processes // case.pp, processes)
    for rank, result in enumerate(run_all(processes)[name]):
        assert not result.wrong
        assert result.gradients >= 10 or case.forward_only
        assert len(result.losses) == case.steps * case.microbatches
        # In a vee the last stage is on rank 0, and Megatron expects the losses on the last rank.
        has_losses = rank in with_losses or (case.is_vee and rank == 0)
        assert result.own_losses == (result.losses if has_losses else [])


def forwards_in_descending_order(rank: int, ranks: int, microbatches: int) -> Any:
    order = [*reversed(range(microbatches))]
    for mb in order:
        yield F.at(mb)
    for mb in order:
        yield B.at(mb)


def fail_all(rank: int, runs: list[tuple[Any, Case, dict[str, Any]]]) -> list[SchedirError]:
    """The errors of runs, each of which fails in every process."""
    import schedir.megatron

    errors = []
    for schedule, case, arguments in runs:
        own = schedule[rank] if isinstance(schedule, list) else schedule
        with megatron_on_cpu(case), pytest.raises(SchedirError) as caught:
            step = partial(schedir.megatron.forward_backward(own), **arguments)
            provider = partial(schedir.megatron.model_provider, schedule=own)
            train(case, step, provider if case.is_vee else lambda build: build)
        errors.append(caught.value)
    return errors


WRONG: dict[str, tuple[Any, Case, dict[str, Any], str]] = {
    "loop": ("zb_v", LOOP, {}, "is stage 2 of zb_v, and has post_process=True"),
    "chunks": ("one_f_one_b", LOOP, {}, "does not run the 2 model chunks"),
    "microbatches": (compile("gpipe", ranks=2, microbatches=4), Case(), {}, "4 microbatches"),
    "dp": (compile("gpipe", ranks=2, microbatches=8, dp=2), Case(), {}, "dp 2"),
    "replicas": ("dualpipe", LOOP, {}, "several ranks"),
    "tied": ("zb_v", replace(VEE, tied=True), {}, "share_embeddings_and_output_weights"),
    "order": (forwards_in_descending_order, Case(), {}, "ascending order"),
    "shapes": ("gpipe", Case(), {"adjust_tensor_shapes_fn": max}, "adjust_tensor_shapes_fn"),
    "setting": ("gpipe", Case(settings=PARTIAL), {}, "num_microbatches_with_partial"),
    "ranks": (["gpipe", "one_f_one_b"], Case(), {}, "the program is"),
}


def test_refused_on_all_ranks_before_the_first_message() -> None:
    runs = [run[:3] for run in WRONG.values()]
    for name, *errors in zip(WRONG, *spawn.run(fail_all, 2, runs), strict=True):
        assert str(errors[0]) == str(errors[1]), name
        assert WRONG[name][3] in str(errors[0]), (name, str(errors[0]))


def test_a_name_that_does_not_exist() -> None:
    import schedir.megatron

    with pytest.raises(UsageError, match="zb_h9"):
        schedir.megatron.forward_backward("zb_h9")
