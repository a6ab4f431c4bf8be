"""Tests of ZeRO-Infinity's equations against the paper, against counts, and against programs."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import schedir
from schedir import (
    Costs,
    PipelineShape,
    Program,
    check,
    compile,
    from_text,
    schedules,
    simulate,
    to_text,
)
from schedir.errors import UsageError
from schedir.planner import ParallelPlan, TransformerSpec
from schedir.planner.transformer.layer_ops import list_layer_ops
from schedir.predict import zero_infinity as zi

K, TiB = 1024, 2**40
# Figure 2a of arXiv 2104.07857, by layers and hidden size: TiB of model states, and of the
# checkpoints of 32 sequences of 1024.
FIGURE_2A = {
    (80, 10 * K): (1.83, 0.05),
    (100, 20 * K): (9.16, 0.12),
    (128, 25 * K): (18.31, 0.20),
    (195, 64 * K): (182.81, 0.76),
    (315, 160 * K): (1845.70, 3.08),
}
PEAK = 70e12  # operations per second that a V100 reaches, section 4.2
SIZE = st.integers(1, 10**5)
RATE = st.floats(1e6, 1e15)


@pytest.mark.parametrize(("model", "told"), FIGURE_2A.items())
def test_figure_2a_matches_equations(model: tuple[int, int], told: tuple[float, float]) -> None:
    layers, hidden = model
    computed = (
        zi.zero_model_states(layers, hidden) / TiB,
        zi.checkpoint_bytes(layers, hidden, K, 32) / TiB,
    )
    for computed_value, published_value in zip(computed, told, strict=True):
        assert abs(computed_value - published_value) < 0.00501


@given(nl=SIZE, hd=SIZE, seq=SIZE, bsz=SIZE, ci=SIZE, bw=RATE)
def test_equations_match_paper(nl: int, hd: int, seq: int, bsz: int, ci: int, bw: float) -> None:
    ait = zi.intensity_of_checkpoints(hd, ci)
    printed = {
        12 * nl * hd**2: zi.count_parameters(nl, hd),
        240 * nl * hd**2: zi.zero_model_states(nl, hd),
        2 * bsz * seq * hd * nl / ci: zi.checkpoint_bytes(nl, hd, seq, bsz, ci),
        2 * 4 * 12 * bsz * seq * nl * hd**2: zi.count_operations(nl, hd, seq, bsz),
        seq * bsz: zi.intensity_of_parameters(seq, bsz),
        seq * bsz / 4: zi.intensity_of_optimizer(seq, bsz),
        24 * hd * ci: ait,
        ait * bw / (ait * bw + PEAK): zi.compute_efficiency(ait, bw, PEAK),
    }
    for printed_value, computed_value in printed.items():
        assert computed_value == pytest.approx(printed_value, rel=1e-12)


@given(SIZE, SIZE, st.integers(1, 64), st.integers(1, 64))
def test_bytes_and_operations_match_other_papers(
    layers: int, hidden: int, sequence: int, batch: int
) -> None:
    """They equal the checkpoint of arXiv 2205.05198, the states of 1910.02054, and the planner."""
    layer_bytes = schedir.activation_bytes_per_layer(sequence, batch, hidden, 1, recompute="full")
    assert zi.checkpoint_bytes(layers, hidden, sequence, batch) == layers * layer_bytes
    psi = zi.count_parameters(layers, hidden)
    states = schedir.zero_model_states(2 * psi, 2 * psi, 16 * psi, zero=0, dp=1)
    assert zi.zero_model_states(layers, hidden) == pytest.approx(states.total)
    width = 64 * min(hidden, 2**16)  # the feed-forward network is at most 2**24 wide
    model = TransformerSpec(layers=1, hidden=width, heads=1, vocab=2, sequence=sequence)
    weights = [
        g for g in list_layer_ops(model, ParallelPlan(microbatch_size=batch)).gemms if g.has_weight
    ]
    forward = sum(g.forward_flops for g in weights)  # attention's scores are left out
    assert zi.count_operations(1, width, sequence, batch) == pytest.approx(4 * forward)
    assert zi.count_parameters(1, width) == sum(g.n * g.k for g in weights)


@given(st.floats(0.01, 0.99), RATE, st.booleans())
def test_required_bandwidth_inverts_efficiency(share: float, ait: float, overlapped: bool) -> None:
    bw = zi.required_bandwidth(share, ait, PEAK, overlapped=overlapped)
    assert zi.compute_efficiency(ait, bw, PEAK, overlapped=overlapped) == pytest.approx(share)


def test_section_4_conclusions_hold() -> None:
    over_half = zi.compute_efficiency(zi.intensity_of_parameters(K, 1), 70e9, PEAK)
    assert over_half > 0.5  # parameters and gradients at 70 GB/s, with the smallest batch
    states = zi.required_bandwidth(0.5, zi.intensity_of_optimizer(K, 1), PEAK)
    assert states == 4 * zi.required_bandwidth(0.5, zi.intensity_of_parameters(K, 1), PEAK)
    assert zi.compute_efficiency(zi.intensity_of_optimizer(K, 2), 1.5e12, PEAK) > 0.9
    assert zi.compute_efficiency(zi.intensity_of_checkpoints(2 * K), 2e9, PEAK) > 0.5
    assert zi.compute_efficiency(zi.intensity_of_checkpoints(8 * K), 1e9, PEAK) > 0.5


# ---------------------------------------------------------------- comparison with programs


@cache
def compile_checkpoint_offload(
    microbatches: int, lead: int, slots: int, *, disk: bool = False
) -> Program:
    """Return a program of one stage that offloads checkpoints after F and loads them before R.

    `lead` forwards come first, and then R, B and a forward in turn. R's checkpoint is loaded two
    turns earlier if it fits. The device has `slots` slots. With `disk`, checkpoints go to the disk
    and back over one lane.
    """
    lead = min(lead, microbatches)
    out = "  F 0.{0}\n  offload 0.{0}\n" + "  spill 0.{0}\n" * disk
    load_text = "  fetch 0.{0}\n" * disk + "  reload 0.{0}\n"
    text = "".join(out.format(k) for k in range(lead))
    ahead = min(slots - 1, 2)
    text += "".join(load_text.format(k) for k in range(min(ahead, microbatches)))
    for k in range(microbatches):
        text += load_text.format(k + ahead) if k + ahead < microbatches else ""
        text += f"  R 0.{k}\n  B 0.{k}\n"
        text += out.format(lead + k) if lead + k < microbatches else ""
    head, _, _ = to_text(compile(schedules.gpipe, PipelineShape(1, microbatches))).partition(
        "\nrank 0"
    )
    return check(from_text(f"{head}\nrank 0  saved {slots}\n{text}  reduce_grads 0\n  step\n"))


def measure_efficiency(
    program: Program, hidden: int, bandwidth: float, *, disk: bool = False
) -> float:
    """Return the share of time in which a device computes, for one layer and one token each."""
    work = zi.count_operations(1, hidden, 1, 1) / 4 / PEAK  # seconds of a forward
    copy = zi.checkpoint_bytes(1, hidden, 1, 1) / bandwidth
    copy_costs = (
        {"offload_to_disk": copy, "reload_from_disk": copy}
        if disk
        else {"offload": copy, "reload": copy}
    )
    run = simulate(program, Costs(F=work, R=work, B=2 * work, **copy_costs))
    return 1 - run.bubble


CASES = [(h, bw) for h in (2 * K, 8 * K, 32 * K) for bw in (0.1e9, 0.5e9, 1e9, 2e9, 16e9)]


@pytest.mark.parametrize(("hidden", "bandwidth"), CASES)
def test_equation_6_is_exact_with_one_slot(hidden: int, bandwidth: float) -> None:
    """All forwards run first, and then all backwards.

    Each F waits for the offload that frees the slot, each reload for the previous B, and each R
    for its reload.
    """
    published = zi.compute_efficiency(zi.intensity_of_checkpoints(hidden), bandwidth, PEAK)
    for microbatches in (1, 2, 7, 64):
        measured = measure_efficiency(
            compile_checkpoint_offload(microbatches, microbatches, 1), hidden, bandwidth
        )
        assert measured == pytest.approx(published, rel=1e-9)


@pytest.mark.parametrize(("hidden", "bandwidth"), CASES)
def test_efficiency_with_many_slots_reaches_overlapped_limit(hidden: int, bandwidth: float) -> None:
    """F and B of different microbatches alternate, and the paper's efficiency is the limit.

    Transfers in both directions use the one lane of the disk, since the paper has one bandwidth.
    """
    published = zi.compute_efficiency(
        zi.intensity_of_checkpoints(hidden), bandwidth, PEAK, overlapped=True
    )
    errors = []
    for microbatches in (32, 128, 512):
        measured = measure_efficiency(
            compile_checkpoint_offload(microbatches, 6, 8, disk=True), hidden, bandwidth, disk=True
        )
        errors.append(abs(measured / published - 1))
    assert errors[2] < 0.01 and errors[2] <= errors[1] <= errors[0]
    # The ends do not overlap, and their share falls with the number of microbatches.
    if published < 1:
        assert errors[0] > 3 * errors[1] > 9 * errors[2] > 0


@pytest.mark.parametrize(("hidden", "bandwidth"), CASES)
def test_two_lanes_equal_one_of_twice_bandwidth(hidden: int, bandwidth: float) -> None:
    """The host's two lanes run in parallel, and equal amounts go in each direction."""
    ait = zi.intensity_of_checkpoints(hidden)
    published = zi.compute_efficiency(ait, 2 * bandwidth, PEAK, overlapped=True)
    measured = measure_efficiency(compile_checkpoint_offload(512, 6, 8), hidden, bandwidth)
    assert measured == pytest.approx(published, rel=0.01)


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: zi.count_parameters(0, 8), "layers"),
        (lambda: zi.zero_model_states(2, 2.5), "hidden"),  # type: ignore[arg-type]
        (lambda: zi.checkpoint_bytes(2, 8, 8, True), "batch"),
        (lambda: zi.checkpoint_bytes(2, 8, 8, 1, 0), "checkpoint_interval"),
        (lambda: zi.compute_efficiency(1, 0, 1), "bandwidth"),
        (lambda: zi.compute_efficiency(float("nan"), 1, 1), "intensity"),
        (lambda: zi.compute_efficiency(1, 1, float("inf")), "peak"),
        (lambda: zi.required_bandwidth(1, 1, 1), "share"),
        (lambda: zi.required_bandwidth(1.5, 1, 1, overlapped=True), "share"),
    ],
)
def test_invalid_sizes_and_rates_are_refused(call: Any, field: str) -> None:
    with pytest.raises(UsageError) as caught:
        call()
    assert caught.value.fields == (field,)
