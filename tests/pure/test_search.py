"""What a search promises: what it finds fits and runs, and nothing in the zoo is shorter."""

from itertools import count
from time import perf_counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedir import Costs, Plan, Sizes, check, compile, schedules, search, show, simulate
from schedir.analysis.compiled import within
from schedir.errors import CostsError
from schedir.shortest.anneal import wave
from schedir.shortest.hunt import Hunt
from schedir.shortest.machine import LOOPS, Machine, Policy
from schedir.shortest.orders import codes_of, draft_of, length, peaks
from schedir.shortest.problem import problem_of

EVEN = Costs(F=18.522, I=18.086, W=9.337, send=0.601)


def test_what_is_found_is_a_program() -> None:
    found = search(Plan(4, 12), EVEN, in_flight=6, evaluations=3000)
    assert found.timeline.peak_in_flight.max() <= 6
    for model in ("device", "serial", "edge"):
        check(found.program, model)
    assert simulate(found.program, EVEN).span == found.span >= found.bound
    assert found.trail[-1].span == pytest.approx(found.span)
    assert found.span <= simulate(compile(schedules.zb_h1, Plan(4, 12), costs=EVEN), EVEN).span


def test_a_limit_in_bytes_holds_messages_and_weights() -> None:
    sizes = Sizes(activation=2e6, saved=10e6, tape=4e6, both=12e6, weights=100e6)
    found = search(Plan(4, 12), EVEN, sizes, 160e6, evaluations=3000)
    assert found.timeline.peak_memory.max() <= 160e6
    assert found.span < search(Plan(4, 12), EVEN, sizes, 140e6, evaluations=3000).span


def test_the_seed_and_the_evaluations_say_what_is_found() -> None:
    one, other = (
        search(Plan(4, 8), Costs(F=3, I=(4, 5, 6, 5), W=2), in_flight=3, evaluations=5000, seed=7)
        for _ in "12"
    )
    assert show(one.program) == show(other.program)
    assert one.tried == other.tried <= 5000


def test_nothing_is_moved_when_the_seconds_are_over() -> None:
    problem = problem_of(Plan(4, 8), Costs(F=2, I=2, W=1), in_flight=3)
    order = codes_of(compile(schedules.zb_h1, problem.plan), split=True)
    hunt = Hunt(
        problem, 0.0, begin=perf_counter(), seconds=1e-9, evaluations=None, seed=0,
        report=lambda _: None,
    )  # fmt: skip
    hunt.take(1.0, order, "given")
    assert not hunt.run()
    tried = hunt.tried
    assert list(hunt.finalists()) == [(1.0, order)] and hunt.tried == tried


def test_costs_of_whole_backwards_are_not_split() -> None:
    with pytest.raises(CostsError, match="not its parts, I and W"):
        search(Plan(2, 4), Costs(F=10, B=20))
    assert search(Plan(2, 4), Costs(F=10, B=20), split=False, evaluations=99).span == 150


def test_machine_code_and_lists_have_the_same_bits() -> None:
    problem = problem_of(
        Plan(4, 8, 2), Costs(F=(1, 2, 1, 3, 1, 2, 2, 2), I=2, W=1.1, send=0.3), in_flight=5
    )
    loops = within(LOOPS, 60)
    if loops is None:
        pytest.skip("numba is not here")
    found = []
    for machine in (Machine(problem), Machine(problem, loops)):
        first = machine.run(Policy((9, 7, 6, 5, 4, 3, 2, 1), (2, 1, 1, 0), slack=0.5))
        order = machine.made
        moving = machine.annealing(order, 3.0, 0.999, 5)
        found.append((first, order, moving.run(700, 0.0), moving.run(300, 0.0), moving.best))
    assert found[0] == found[1]


policy = st.builds(
    lambda lead, lag, **more: Policy(tuple(lead), tuple(lag), **more),
    lead=st.lists(st.integers(1, 9), min_size=6, max_size=6),
    lag=st.lists(st.integers(0, 9), min_size=3, max_size=3),
    wait=st.sampled_from([0.0, 0.5, 1.0]),
    late=st.sampled_from([float("-inf"), 0.0, 0.5]),
    slack=st.sampled_from([0.0, 0.5, float("inf")]),
    forward_first=st.booleans(),
    pick=st.integers(0, 2),
)


@given(
    policy,
    st.sampled_from(["loop", "vee", (0, 1, 2, 2, 0, 1)]),
    st.integers(2, 7),
    st.booleans(),
    st.integers(0, 2**31 - 1),
)
def test_any_policy_ends_and_fits(policy, placement, room, split, seed) -> None:  # type: ignore[no-untyped-def]
    """And so does all that comes of it by moving work; both loops agree with plain evaluation."""
    costs = Costs(F=(1, 2, 1, 3, 1, 2), I=2, W=1.1, send=0.3)
    problem = problem_of(Plan(3, 5, 2, placement), costs, in_flight=room, split=split)
    machine = Machine(problem)
    takes = machine.run(policy)
    moving = machine.annealing(machine.made, 2.0, 0.99, seed)
    shorter = moving.run(60, 0.0)
    assert shorter <= takes < float("inf")
    for order, said in ((machine.made, takes), (moving.best, shorter)):
        assert length(problem, order) == said
        assert all(map(problem.fits, peaks(problem, order), count()))
        program = compile(draft_of(problem, order), costs=costs)
        assert codes_of(program, split=split) == order


def test_a_wave_does_the_like_on_other_ranks() -> None:
    codes = [c for stage in range(3) for c in (3 * stage, 3 * stage, 3 * stage + 1, 3 * stage + 2)]
    first, own, begin = [0, 4, 8, 12], [0, 1, 2], [0, 1, 2, 3]
    nth = [0, 1, 0, 0] * 3
    rank_at = [x // 4 for x in range(12)]

    def after(low: int, high: int, behind: int) -> tuple[int, list[int]]:
        code = list(codes)
        return wave(low, high, own, begin, first, code, nth, rank_at, 6, behind), code

    # Rank 1's I0 goes before its F1; on ranks 0 and 2, too, where they are among those.
    changed, code = after(1, 2, 0)
    assert changed == 2 and code == [0, 0, 1, 2, 3, 4, 3, 5, 6, 7, 6, 8]
    assert after(0, 2, 1)[1] == [0, 1, 0, 2, 3, 4, 3, 5, 6, 7, 6, 8]
