"""The executor: the bits of the reference, in any legal order, in one process and over Gloo."""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from schedir import gpt
from schedir.compile import compile, lower
from schedir.errors import ExecutionError, ModelError
from schedir.ops import COMPUTE, ROWS, TRANSFERS, Per, Token
from schedir.plan import Plan
from schedir.program import Program
from schedir.runtime.c10d import Gloo, measured
from schedir.runtime.executor import Executor
from schedir.runtime.inprocess import InProcess
from schedir.runtime.rank import Boundary
from schedir.runtime.reference import reference
from schedir.schedules import gpipe, interleaved, one_f_one_b
from schedir.testing import plans, random_draft
from schedir.words import B, F, I, W, Word
from tests.gloo.spawn import RankError, run

CONTEXT, HIDDEN, BATCH = 8, 16, 2
BOUNDARY = Boundary((BATCH, CONTEXT, HIDDEN))


def zb(r: int, P: int, m: int) -> Word:
    """1F1B with every backward split."""
    lead = min(P - 1 - r, m)
    return lead * F + (m - lead) * (F + I) + lead * I + m * W


def config(layers: int, tied: bool = True) -> gpt.GPTConfig:
    return gpt.GPTConfig(
        vocab=32, layers=layers, hidden=HIDDEN, heads=2, context=CONTEXT, tied=tied
    )


def batch(microbatches: int, seed: int = 0) -> tuple[Tensor, Tensor, float]:
    """Inputs, targets (some of them not counted) and the scale that makes a mean of a sum."""
    numbers = torch.Generator().manual_seed(seed)
    shape = (microbatches, BATCH, CONTEXT)
    inputs, targets = (torch.randint(0, 32, shape, generator=numbers) for _ in range(2))
    targets[:, 0, :2] = gpt.IGNORE
    return inputs, targets, 1 / gpt.count_tokens(targets)


def gpt_stages(stages: int, tied: bool = True) -> list[nn.Module]:
    return [gpt.build_stage(config(stages, tied), s, stages) for s in range(stages)]


def gradients(stages: Sequence[nn.Module]) -> list[dict[str, Tensor]]:
    return [
        {n: p.grad.clone() for n, p in s.named_parameters() if p.grad is not None} for s in stages
    ]


def same_bits(one: list[dict[str, Tensor]], other: list[dict[str, Tensor]]) -> bool:
    return all(
        a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
        for a, b in zip(one, other, strict=True)
    )


def expected(plan: Plan, tied: bool = True) -> tuple[Tensor, list[dict[str, Tensor]]]:
    stages = gpt_stages(plan.stages, tied)
    inputs, targets, scale = batch(plan.microbatches)
    loss = reference(stages, inputs, targets, loss=gpt.loss, scale=scale)
    return loss, gradients(stages)


@settings(max_examples=25)
@given(
    plans(ranks=3, microbatches=4, stages_per_rank=2),
    st.integers(0, 2**32),
    st.booleans(),
    st.data(),
)
def test_random_schedules_in_random_orders_give_the_same_bits(
    plan: Plan, seed: int, tied: bool, data: st.DataObject
) -> None:
    program = lower(_with(random_draft(plan, random.Random(seed)), tied))
    assert program.ascending
    loss, right = expected(plan, tied)
    stages = gpt_stages(plan.stages, tied)
    ranks = InProcess(program, stages, loss=gpt.loss, boundary=BOUNDARY)
    inputs, targets, scale = batch(plan.microbatches)
    for order in data.draw(st.lists(st.integers(0, 2**32), min_size=2, max_size=3)):
        assert torch.equal(ranks.step(inputs, targets, scale, seed=order), loss)
        assert same_bits(gradients(stages), right)


def _with(program: Program, tied: bool) -> Program:
    from dataclasses import replace

    return replace(program, tied=tied)


PLANS = [
    (gpipe, Plan(2, 4)),
    (gpipe, Plan(4, 4)),
    (one_f_one_b, Plan(2, 4)),
    (one_f_one_b, Plan(4, 6)),
    (zb, Plan(2, 4)),
    (zb, Plan(4, 4)),
    (interleaved, Plan(2, 4, 2)),  # both neighbours are the same peer
    (interleaved, Plan(2, 5, 3)),
    (interleaved, Plan(4, 4, 2)),
    (interleaved, Plan(1, 3, 2)),  # first and last stage share a rank
    (one_f_one_b, Plan(1, 3)),
]


def _vee(r: int, P: int, m: int) -> Word:
    return m * F[0] + m * F[1] + m * B[1] + m * B[0]


@pytest.mark.parametrize(("schedule", "plan"), [*PLANS, (_vee, Plan(3, 3, placement="vee"))])
def test_in_process(schedule: Any, plan: Plan) -> None:
    loss, right = expected(plan)
    stages = gpt_stages(plan.stages)
    for overlap in (False, True):
        program = compile(schedule, plan, tied=True, model="edge", overlap=overlap)
        ranks = InProcess(program, stages, loss=gpt.loss, boundary=BOUNDARY)
        for seed in range(3):
            assert torch.equal(ranks.step(*batch(plan.microbatches), seed=seed), loss)
            assert same_bits(gradients(stages), right)


# ---------------------------------------------------------------- real processes


def _one_rank(rank: int, schedule: Any, plan: Plan, options: dict[str, Any]) -> Any:
    """One process of a training step: gradients by stage, loss, and where it stands."""
    program = compile(schedule, plan, model="edge", tied=True, **options)
    transport = Gloo(program)
    cfg = config(plan.stages)
    stages = {
        s: gpt.build_stage(cfg, s, plan.stages, tp=transport.tp_group)
        for s in plan.stages_of[transport.rank]
    }
    executor = Executor(
        program,
        transport.rank,
        stages,
        transport,
        loss=partial(gpt.loss, tp=transport.tp_group),
        boundary=BOUNDARY,
        max_norm=options.get("max_norm", 0.05),
    )
    inputs, targets, scale = batch(plan.microbatches * program.dp)
    own = slice(transport.dp_rank * plan.microbatches, (transport.dp_rank + 1) * plan.microbatches)
    for _ in range(2):  # twice: a step leaves nothing behind
        loss = executor.step(inputs[own], targets[own], scale)
    timeline = measured(executor, transport)
    if timeline is not None:
        assert timeline.kind == "measured" and 0 < timeline.bubble < 1
        assert (timeline.spans["end"] >= timeline.spans["start"]).all()
    grads = {s: gradients([m])[0] for s, m in stages.items()}
    return grads, loss, float(executor.norm)


def step_on_gloo(schedule: Any, plan: Plan, **options: Any) -> list[Any]:
    world = plan.ranks * options.get("tp", 1) * options.get("dp", 1)
    return run(_one_rank, world, schedule, plan, options)


@pytest.mark.parametrize(("schedule", "plan"), PLANS[:9])
def test_gloo_gives_the_bits_of_the_reference(schedule: Any, plan: Plan) -> None:
    loss, right = expected(plan)
    results = step_on_gloo(schedule, plan)
    got = {s: g for grads, _, _ in results for s, g in grads.items()}
    assert same_bits([got[s] for s in range(plan.stages)], right)
    assert [torch.equal(l, loss) for _, l, _ in results if l is not None] == [True]


def close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    return float((one - other).norm()) <= tolerance * float(other.norm())


def test_tensor_parallel_schedules_have_the_same_bits_and_are_close_to_one_rank() -> None:
    plan = Plan(2, 4)
    _, right = expected(plan)
    results = {s.__name__: step_on_gloo(s, plan, tp=2) for s in (gpipe, one_f_one_b, zb)}
    first = results["gpipe"]
    for other in results.values():
        for (grads, _, _), (same, _, _) in zip(first, other, strict=True):
            assert same_bits(list(grads.values()), list(same.values()))
    cfg = config(plan.stages)
    for stage in range(plan.stages):
        shards = [first[stage * 2 + t][0][stage] for t in range(2)]
        module = gpt.build_stage(cfg, stage, plan.stages)
        for name, parameter in module.named_parameters():
            whole = _joined([s[name] for s in shards], parameter)
            assert close(whole, right[stage][name], 1e-5), name


def _joined(shards: list[Tensor], parameter: Tensor) -> Tensor:
    """A gradient from its shards: cut along whichever dimension is short, or held whole."""
    if shards[0].shape == parameter.shape:
        assert torch.equal(shards[0], shards[1])
        return shards[0]
    dim = next(d for d in range(parameter.dim()) if shards[0].shape[d] != parameter.shape[d])
    return torch.cat(shards, dim).narrow(dim, 0, parameter.shape[dim])


def test_data_parallel_equals_one_replica() -> None:
    loss, right = expected(Plan(2, 4))
    results = step_on_gloo(one_f_one_b, Plan(2, 2), dp=2)
    for grads, _, _ in results:
        for stage, got in grads.items():
            assert all(close(got[n], right[stage][n], 1e-6) for n in got)
    losses = [l for _, l, _ in results if l is not None]
    assert float(sum(losses)) == pytest.approx(float(loss), rel=1e-6)


@pytest.mark.parametrize("options", [{}, {"tp": 2}])
def test_clipping_counts_every_parameter_once(options: dict[str, int]) -> None:
    """Against torch's own clipping of the untied sum: the tied weight is one parameter."""
    plan = Plan(2, 2)
    _, right = expected(plan)
    unique = [g for s, grads in enumerate(right) for n, g in grads.items()
              if not (s == 1 and g.shape == (32, HIDDEN))]  # fmt: skip
    norm = torch.sqrt(sum((g.double().square().sum() for g in unique), torch.zeros(())))
    results = step_on_gloo(one_f_one_b, plan, clip=True, **options)
    for grads, _, got in results:
        assert got == pytest.approx(float(norm), rel=1e-5)
        for stage, mine in grads.items():
            for name, g in mine.items():
                if g.shape == right[stage][name].shape:
                    assert close(g, right[stage][name] * (0.05 / norm), 1e-4)


# ---------------------------------------------------------------- refusals


def _two_programs(rank: int) -> None:
    Gloo(compile([gpipe, one_f_one_b][rank], Plan(2, 4)))


def _wrong_world(rank: int) -> None:
    Gloo(compile(gpipe, Plan(3, 4)))


@pytest.mark.parametrize("fn", [_two_programs, _wrong_world])
def test_ranks_that_disagree_fail_at_once(fn: Any) -> None:
    with pytest.raises(RankError) as caught:
        run(fn, 2)
    assert all("ModelError" in tb for tb in caught.value.tracebacks.values())


def _in_process(program: Program, stages: list[nn.Module]) -> InProcess:
    return InProcess(program, stages, loss=gpt.loss, boundary=BOUNDARY)


def test_models_that_do_not_fit_are_refused() -> None:
    plan = Plan(2, 2)
    tied, untied = gpt_stages(2), gpt_stages(2, tied=False)
    for program, stages in [
        (compile(gpipe, plan), tied),
        (compile(gpipe, plan, tied=True), untied),
        (compile(gpipe, plan, tp=2, tied=True), tied),
        (compile(gpipe, plan, tied=True), tied[:1]),
    ]:
        with pytest.raises(ModelError):
            _in_process(program, stages)


def test_a_failing_stage_is_named() -> None:
    class Broken(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("no such luck\nat all")

    program = compile(gpipe, Plan(2, 2), tied=False)
    stages = gpt_stages(2, tied=False)
    stages[1] = Broken(1, 1)
    with pytest.raises(ExecutionError) as caught:
        _in_process(program, stages).step(*batch(2))
    site = caught.value.sites[0]
    assert (site.rank, str(site.instr)) == (1, "F 1.0") or str(site.instr) == "F 1.1"
    with pytest.raises(ExecutionError):
        _in_process(program, stages).step([], [])


@pytest.mark.parametrize("wrong", [lambda x: (x, x), lambda x: x[:, :1], lambda x: x.double()])
def test_what_does_not_fit_the_boundary_is_refused(wrong: Any) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = gpt_stages(2, tied=False)[0]

        def forward(self, x: Tensor) -> Any:
            return wrong(self.inner(x))

    program = compile(gpipe, Plan(2, 2))
    stages = [Odd(), gpt_stages(2, tied=False)[1]]
    with pytest.raises(ExecutionError) as caught:
        _in_process(program, stages).step(*batch(2))
    assert isinstance(caught.value.__cause__, ModelError)
    assert caught.value.sites[0].rank == 0


def test_what_cannot_be_split_runs_whole_with_one_warning_each() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(HIDDEN))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    def loss(y: Tensor, target: Tensor) -> Tensor:
        return (y - target).square().sum()

    x = torch.randn(3, BATCH, CONTEXT, HIDDEN)
    plan = Plan(2, 3)
    one, other = [Plain(), Plain()], [Plain(), Plain()]
    reference(one, x, x + 1, loss=loss)
    ranks = InProcess(compile(zb, plan), other, loss=loss, boundary=BOUNDARY)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ranks.step(x, x + 1)
    assert same_bits(gradients(one), gradients(other))
    assert len(caught) == 2 and all("Plain" in str(w.message) for w in caught)


def test_evaluation_has_no_gradients() -> None:
    plan = Plan(2, 3)
    program = compile(lambda r, P, m: m * F, plan)
    stages = gpt_stages(2, tied=False)
    loss, _ = expected(plan, tied=False)
    got = _in_process(program, stages).step(*batch(3))
    assert torch.equal(got, loss)
    assert not any(g.any() for grads in gradients(stages) for g in grads.values())


def test_rows_do_not_lie() -> None:
    """Each instruction of a middle stage finds, leaves and clears what its row declares."""
    slots = {
        Token.ACT_IN: "act_in",
        Token.ACT_OUT: "act_out",
        Token.SAVED: "saved",
        Token.GRAD_IN: "grad_in",
        Token.GRAD_OUT: "grad_out",
        Token.TAPE: "tape",
    }
    met = set()
    for schedule in (one_f_one_b, zb):
        program = compile(schedule, Plan(3, 3), tied=True)
        ranks = InProcess(program, gpt_stages(3), loss=gpt.loss, boundary=BOUNDARY)
        middle = ranks.ranks[1]
        call = middle.call

        def watched(k: int, call: Any = call, middle: Executor = middle) -> None:
            instr, stage = middle.stream[k], middle.stages[1]
            row = ROWS[instr.op]

            def held() -> set[Token]:
                return {
                    t for t, name in slots.items() if getattr(stage, name)[instr.mb] is not None
                }

            before = held()
            call(k)
            after, known = held(), {*slots}
            if row.per is Per.MICROBATCH:
                assert {*row.needs} & known <= before, instr
                assert after - before == {*row.gives} & known - before, instr
                assert before - after == {*row.frees} & known, instr
                met.add(row.op)

        middle.call = watched  # type: ignore[method-assign]
        ranks.step(*batch(3))
    assert met == {*COMPUTE, *TRANSFERS}
