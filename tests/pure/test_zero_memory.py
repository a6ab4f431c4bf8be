"""Tests of memory with ZeRO: shards all the time, and full tensors while they are needed."""

from __future__ import annotations

import json
import random
from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedir.__main__ import main
from schedir.analysis.memory.footprint import compute_footprints
from schedir.compiler.compile import check_memory, compile, lower
from schedir.errors import MemoryLimitError, UsageError
from schedir.ir.cost.sizes import Sizes
from schedir.ir.isa.instructions import GRAD_ADDING_OPS, Opcode
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.predict.simulate import simulate
from schedir.schedules import gpipe, interleaved, looped_bfs, one_f_one_b, zb_h1
from schedir.testing import compute_programs
from tests.strategies import costs

WEIGHTS, GRADIENT = "unsharded weights", "unsharded gradients"
_ENDS = (Opcode.ReduceReplicatedStages, Opcode.ReduceTied, Opcode.ReduceNorm, Opcode.OptimizerStep)


def list_unsharded_by_hand(program: Program, rank: int) -> list[tuple[set[int], set[int]]]:
    """Return the stages with full weights and full gradients on a rank during each instruction.

    The host frees a gradient when it waits for its reduction. It waits for the oldest first, at the
    end, where a backward needs a new full gradient, and where slots require it.
    """
    stream, unsharded = program.streams[rank], []
    specified_slots = program.slots[rank].specified() if program.slots else {}
    slots = specified_slots.get("wgrad", 2**31)
    weights, gradients = set[int](), set[int]()
    under_way, filled, heard = deque[int](), 0, 0
    groups: list[list[int]] = []
    for k, joined in enumerate(stream.joined.tolist()):
        groups = [*groups[:-1], [*groups[-1], k]] if joined else [*groups, [k]]
    for group in groups:
        for i in [stream[k] for k in group]:
            if i.op is Opcode.Unshard:
                assert i.stage not in weights
                weights.add(i.stage)
            if i.op in GRAD_ADDING_OPS and i.stage >= program.frozen_stages:
                new = i.stage not in gradients or i.stage in under_way
                while new and under_way and (i.stage in under_way or filled - heard >= slots):
                    gradients.remove(under_way.popleft())
                    heard += 1
                filled += new
                gradients.add(i.stage)
            if i.op in _ENDS and (i.op is not Opcode.ReduceReplicatedStages or program.dp > 1):
                heard += len(under_way)
                gradients -= {*under_way}
                under_way.clear()
        unsharded += [({*weights}, {*gradients})] * len(group)
        for i in [stream[k] for k in group]:
            if i.op is Opcode.Reshard:
                weights.remove(i.stage)
            if i.op is Opcode.ReduceScatter:
                under_way.append(i.stage)
    assert not (weights or gradients)
    return unsharded


def list_predicted_bytes(program: Program, sizes: Sizes, name: str, rank: int) -> list[float]:
    """Return the predicted bytes of a name during each instruction of a rank."""
    footprint, joined = (
        compute_footprints(program, sizes)[rank],
        program.streams[rank].joined.tolist(),
    )
    bytes_of, running_bytes = footprint.dynamic_memory[name][1], []
    for k in range(len(joined)):
        group_first = group_last = k
        while joined[group_first]:
            group_first -= 1
        while group_last + 1 < len(joined) and joined[group_last + 1]:
            group_last += 1
        began = (footprint.positions < group_first) | footprint.is_at_start & (
            footprint.positions <= group_last
        )
        running_bytes.append(float(bytes_of[np.flatnonzero(began)[-1]]))
    return running_bytes


@settings(max_examples=80)
@given(compute_programs(), st.sampled_from([2, 3]), st.randoms(use_true_random=False), st.data())
def test_unsharded_memory_matches_hand_count(
    draft: Program, zero: int, rng: random.Random, data: st.DataObject
) -> None:
    if draft.shape.optimizer_steps > 1 or not draft.has_backward:
        return
    program = replace(
        draft,
        dp=4,
        zero=zero,
        reduce_scatter_at=rng.choice(["update_end", "each_backward"]),
        norm_check="before_step",
    )
    program = lower(program, buffer_sharing=rng.choice([None, "minimal"]))
    stage_sizes = st.lists(
        st.integers(0, 9), min_size=draft.shape.stages, max_size=draft.shape.stages
    )
    shard_sizes = {
        name: np.array(data.draw(stage_sizes), float) for name in ("params", "grads", "optimizer")
    }
    sizes = Sizes(**{name: tuple((4 * size).tolist()) for name, size in shard_sizes.items()})
    worst_case = compute_footprints(program, sizes, worst_case=True)
    time = data.draw(costs(draft.shape))
    slow = replace(time, **{op: float(rng.randrange(9)) for op in ("unshard", "reduce_scatter")})
    curves = simulate(program, slow, sizes=sizes).memory
    for rank, footprint in enumerate(compute_footprints(program, sizes)):
        expected = list_unsharded_by_hand(program, rank)
        for name, k, size in ((WEIGHTS, 0, "params"), (GRADIENT, 1, "grads")):
            unsharded_bytes = [
                float(sum(4 * shard_sizes[size][s] for s in stages_now[k]))
                for stages_now in expected
            ]
            if name == WEIGHTS and zero < 3:
                assert name not in footprint.dynamic_memory
                continue
            assert list_predicted_bytes(program, sizes, name, rank) == unsharded_bytes
            max_bytes = worst_case[rank].dynamic_memory[name][1].max()  # whatever the timing
            assert max(unsharded_bytes) <= max_bytes
            assert curves[rank].by_kind[name].max() <= max_bytes
            assert (
                max(footprint.total_bytes.max(), curves[rank].total.max())
                <= worst_case[rank].total_bytes.max()
            )
        static_sizes = {name: size for name, (_, size) in footprint.static_memory.items()}
        for name, sharded_name, level in (
            ("params", "sharded weights", 3),
            ("grads", "sharded gradients", 2),
            ("optimizer", "sharded optimizer state", 1),
        ):
            stages = np.array(draft.shape.stages_on_rank[rank])
            trained = stages >= program.frozen_stages
            assert level <= zero or sharded_name not in static_sizes
            if level <= zero and sizes.specified_parts:
                assert static_sizes.get(sharded_name, 0) == shard_sizes[name][stages[trained]].sum()
                assert static_sizes.get(name, 0) == 4 * shard_sizes[name][stages[~trained]].sum()


SIZES = Sizes(saved=10, params=160, grads=160, optimizer=480)


@pytest.mark.parametrize(
    ("zero", "static_bytes", "peak_bytes"),
    [
        (0, 2 * 800, 2 * 800),
        (1, 2 * (160 + 160 + 480 / 4), 2 * (160 + 160 + 480 / 4)),
        (2, 2 * (160 + 640 / 4), 2 * (160 + 640 / 4) + 160),
        (3, 2 * 800 / 4, 2 * 800 / 4 + 2 * 160 + 160),
    ],
)
def test_zero_levels_hold_published_memory(
    zero: int, static_bytes: float, peak_bytes: float
) -> None:
    """With breadth-first order and the fewest slots, there is also one full gradient.

    There are also full weights of the computing stage and of the next one.
    """
    program = compile(looped_bfs, PipelineShape(2, 4, 2), dp=4, zero=zero, buffer_sharing="minimal")
    owns = compute_footprints(program, replace(SIZES, saved=0))
    assert [sum(size for _, size in footprint.static_memory.values()) for footprint in owns] == [
        static_bytes,
        static_bytes,
    ]
    curves = simulate(program, sizes=replace(SIZES, saved=0)).memory
    assert [curve.total.max() for curve in curves] == [peak_bytes, peak_bytes]


def test_reducing_each_backward_holds_one_gradient() -> None:
    """With `each_backward`, one full gradient exists at a time. With `update_end`, all exist."""
    peaks = {}
    for reduce_at in ("update_end", "each_backward"):
        program = compile(
            interleaved,
            PipelineShape(2, 4, 2),
            dp=4,
            zero=2,
            reduce_scatter_at=reduce_at,
            buffer_sharing="minimal",
        )
        peaks[reduce_at] = [
            footprint.dynamic_memory[GRADIENT][1].max()
            for footprint in compute_footprints(program, SIZES)
        ]
    assert peaks == {"update_end": [320, 320], "each_backward": [160, 160]}


def test_zero_1_has_no_unsharded_memory() -> None:
    """At level 1 the parameters are the full weights, and gradients are full too."""
    program = compile(zb_h1, PipelineShape(2, 4), dp=4, zero=1, buffer_sharing="minimal")
    assert all(
        not {WEIGHTS, GRADIENT} & {*footprint.dynamic_memory, *footprint.static_memory}
        for footprint in compute_footprints(program, SIZES)
    )
    assert "unsharded_params" not in program.slots[0].specified()
    assert "wgrad" not in program.slots[0].specified()


def test_memory_limit_error_names_sharded_and_unsharded() -> None:
    program = compile(looped_bfs, PipelineShape(2, 4, 2), dp=4, zero=3, buffer_sharing="minimal")
    max_bytes = max(
        footprint.total_bytes.max()
        for footprint in compute_footprints(program, SIZES, worst_case=True)
    )
    assert check_memory(program, SIZES, max_bytes) is program
    with pytest.raises(MemoryLimitError) as error:
        check_memory(program, SIZES, max_bytes - 1)
    rows = {name: (number, size) for name, number, size in error.value.live_values}
    assert rows[WEIGHTS] == (2, 320) and rows[GRADIENT] == (1, 160)
    assert rows["sharded weights"] == rows["sharded gradients"] == (2, 80)
    assert rows["sharded optimizer state"] == (2, 240)


def test_zero_refuses_model_states_size() -> None:
    program = compile(one_f_one_b, PipelineShape(2, 4), dp=2, zero=1)
    with pytest.raises(UsageError) as error:
        compute_footprints(program, Sizes(saved=1, model_states=100))
    assert error.value.fields == ("model_states", "zero")
    assert (
        compute_footprints(program, Sizes(saved=1, params=10, grads=10, optimizer=80))[
            0
        ].total_bytes[0]
        == 60
    )


def test_recompute_fit_counts_shards() -> None:
    """The program recomputes as few forwards as the limit requires. Shards count as shards."""
    sizes = replace(SIZES, recompute_inputs=1.0)
    num_recomputes = {}
    for zero in (0, 3):
        program = compile(
            gpipe,
            PipelineShape(2, 4),
            dp=4,
            zero=zero,
            sizes=sizes,
            memory_limit=830,
            recompute="fit",
        )
        num_recomputes[zero] = int((program.op == Opcode.Recompute).sum())
    assert num_recomputes[0] > num_recomputes[3] == 0


def test_simulate_prints_sharded_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """The output has columns of shards, and of the peak of full tensors."""
    command = ["simulate", "interleaved", "--ranks", "2", "--microbatches", "4", "-O", "dp=4"]
    command += ["--stages-per-rank", "2", "-O", "zero=3", "--json", "--sizes"]
    assert main([*command, "saved=10,params=160,grads=160,optimizer=480:480:80:80"]) == 0
    facts = json.loads(capsys.readouterr().out)
    keys = ("sharded_weights", "sharded_gradients", "sharded_optimizer_state")
    assert [facts[name] for name in keys] == [[80, 80], [80, 80], [140, 140]]
    assert facts["unsharded_weights"] == facts["unsharded_gradients"] == [320, 320]
    assert main([*command, "weights=10"]) == 2
