"""What if: what would make a step shorter, each claim from simulating the change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np

from schedir.analysis.models import Model
from schedir.compiler.again import compute_of, fitting, options_of
from schedir.compiler.compile import compile
from schedir.errors import PlanError, ProgramError
from schedir.ir.costs import FIELD, OF_A_STAGE, Cost, Costs
from schedir.ir.ops import (
    BACKWARD,
    BACKWARD_INPUT,
    COMPUTE,
    FORWARD,
    RECOMPUTE,
    ROWS,
    SHARDING,
    TRANSFERS,
    Lane,
    Token,
)
from schedir.ir.per_stage import cut, evened, from_grid, grid, is_array, of_whole
from schedir.ir.plan import Plan
from schedir.ir.program import TRAITS, Program
from schedir.ir.ties import show_tied, tied_stages
from schedir.passes.cut import cut_like
from schedir.predict.calibrate import MISSED, calibrate, completed, missed_by, rounded
from schedir.predict.late_moves import MOVES
from schedir.predict.simulate import simulate
from schedir.predict.timeline import Timeline, expect_runs
from schedir.schedules import built_in
from schedir.schedules.draft import draft
from schedir.schedules.greedy import greedy
from schedir.schedules.words import Schedule, delay_for, placed_for

LEAST: Final = 0.005  # of the time of a microbatch: what saves less is not worth a word
LARGE: Final = 100_000  # instructions of a program for which other orders are not searched
_I: Final = BACKWARD_INPUT
_WORK: Final = (*(FIELD[op] for op in COMPUTE), "FB")
_MOVED: Final = ("offload", "spill")  # the options that move what forwards saved
_SUMMED: Final = "sums of pieces"
_GATHERED: Final = {False: "messages", True: _SUMMED}  # by whether ranks share the sequence
# What is tried to take no time, in words, by its costs.
_FREE: Final[dict[str, tuple[str, ...]]] = {
    "messages": ("send", "scatter"),
    _SUMMED: ("sum",),
    "reductions": tuple(
        FIELD[row.op] for row in ROWS if row.lane is Lane.DP or Token.GRAD in row.gives
    ),
    "gathers of weights": tuple(FIELD[row.op] for row in ROWS if row.lane is Lane.PARAMS),
    "snapshots": tuple(FIELD[row.op] for row in ROWS if Token.COPY in row.gives),
    "copies to the host and its disk, and back,": tuple(chain(*MOVES.values())),
}


def _twice(costs: Costs) -> Costs:
    """The costs of all microbatches, and again of as many."""
    again = {name: from_grid(np.tile(grid(c), 2)) for name, c in costs.told.items() if is_array(c)}
    return replace(costs, **again)


class Anew(NamedTuple):
    """The compute of a program, lowered anew: the program that this gives, and with which `costs`
    and which `overlap` of `compile` it does; without costs in the order of the usual ones.
    """

    program: Program
    costs: Costs | None
    overlap: bool


@dataclass(frozen=True)
class Change:
    """What could be changed, and the share of the time of a microbatch that it saves.

    `anew` is the changed program, where it is the same compute with other transfers; `model` is
    the progress model, where that is what is changed.
    """

    what: str
    saves: float
    anew: Anew | None = None
    model: Model | None = None


class Trial(NamedTuple):
    """A changed run, and how many microbatches it has."""

    what: str
    run: Timeline
    microbatches: int
    anew: Anew | None = None


class Advice(NamedTuple):
    """What is simulated: the run as it is, at these costs, and the changes, best first.

    `error` is how much longer than the run the simulation of it takes, over the run: 0 for a
    prediction.  Where it is more than MISSED, either way, nothing is changed and no advice given.
    """

    base: Timeline
    error: float
    changes: list[Change]

    @property
    def given(self) -> bool:
        """Whether the simulation is near enough to the run to say what would change it."""
        return abs(self.error) <= MISSED


def advise(
    timeline: Timeline, costs: Costs | None = None, schedule: Schedule | None = None
) -> Advice:
    """What would make a run shorter.

    `costs` are those of a prediction; without, they are read off the run (`calibrate`).
    `schedule` is what the program was compiled from; without, a built-in schedule that gives
    the same program is used, or more microbatches are not tried.
    """
    expect_runs([timeline])
    program = timeline.program
    costs = completed(costs or calibrate(timeline), program)
    base = simulate(program, costs, model=timeline.model, blocks=timeline.blocks)
    base = replace(base, unit=timeline.unit)
    advice = Advice(base, missed_by(base, timeline), [])
    if not advice.given:
        return advice
    found: dict[int, Change] = {}
    for kind, change in _Changes(base, costs, schedule or _recipe(program)).all():
        if kind not in found or change.saves > found[kind].saves:
            found[kind] = change
    return advice._replace(changes=sorted(found.values(), key=lambda change: -change.saves))


def _recipe(program: Program) -> Schedule | None:
    """The built-in schedule of the program's name, if it gives this program."""
    schedule = built_in().get(program.name)
    if schedule is None:
        return None
    try:
        again = cut_like(draft(schedule, program.whole), program)
    except ProgramError:
        return None
    # Which costs it was lowered with is not known; the order of compute tells.
    return schedule if again.streams == compute_of(program).streams else None


def _besides(program: Program) -> list[bytes]:
    """What each rank does besides its transfers, in its order."""
    kept = [~np.isin(s.op, (*TRANSFERS, *SHARDING)) for s in program.streams]
    return [s.words[own].tobytes() for s, own in zip(program.streams, kept, strict=True)]


class Lowering:
    """How a program was lowered: read off it, and done again to a draft."""

    def __init__(self, program: Program, model: Model) -> None:
        self.like, self.model = program, model
        self.options = options_of(program, model)

    def of(self, drafted: Program, costs: Costs | None, **options: Any) -> Program:
        """A draft lowered in this way, and checked; with `options` as told, and else as they were.

        Where the program recomputes, and the draft does not, all of it is recomputed; where it
        offloads, and the draft is of another plan, all of it is offloaded.
        """
        like = self.like
        traits = {f.name: getattr(like, f.name) for f in TRAITS}
        ops = like.ops - drafted.ops
        again = {"recompute": "all"} if RECOMPUTE in ops else {}
        if drafted.plan != like.plan:  # which of other microbatches, or stages, nobody says
            again |= {name: "all" for name in _MOVED if self.options.get(name)}
        if drafted.plan.stages != like.plan.stages:
            tied = tied_stages(show_tied(like.tied, like.plan) == "yes", drafted.plan)
            traits |= {"tied": tied}
            if like.tied and not tied:
                raise PlanError("of a model that is cut otherwise it is not known what is tied")
            if like.frozen:
                raise PlanError("of a model that is cut otherwise it is not known what is frozen")
            if like.skips:
                raise PlanError("of a model that is cut otherwise it is not known what skips what")
        return compile(
            drafted,
            model=self.model,
            costs=costs,
            **(traits | fitting(self.options, drafted.plan) | again | options),
        )


class _Changes:
    """The changes that are tried.  Each kind gives some; the best of a kind is kept."""

    def __init__(self, base: Timeline, costs: Costs, schedule: Schedule | None) -> None:
        self.base, self.costs, self.schedule = base, costs.usual(), schedule
        self.program, self.plan = base.program, base.program.plan
        self.room = base.peak_activations
        self.lowering = Lowering(self.program, base.model)

    def all(self) -> Iterator[tuple[int, Change]]:
        """Kinds, with a change of each that could be simulated."""
        kinds: tuple[Callable[[], Iterator[Trial]], ...] = (
            self._even_stages,
            *(partial(self._free, what) for what in _FREE),
            self._filled_sums,
            self._other_transfers,
            self._grouped_transfers,
            self._free_queues,
            self._more_microbatches,
            self._other_schedules,
            self._greedy_orders,
        )
        now = self.base.span / self.plan.microbatches
        for k, kind in enumerate(kinds):
            try:
                for what, run, microbatches, anew in kind():
                    if now:
                        model = run.model if run.model != self.base.model else None
                        saves = 1 - run.span / microbatches / now
                        yield k, Change(what, saves, anew, model)
            except ProgramError:  # a schedule that is not for this plan
                continue

    def _run(self, program: Program, costs: Costs) -> Timeline:
        """As the base was simulated."""
        return simulate(program, costs, model=self.base.model, blocks=self.base.blocks)

    def _priced(self, what: str, **costs: Cost) -> Trial:
        """The same program, of which something costs something else."""
        run = self._run(self.program, replace(self.costs, **costs))
        return Trial(what, run, self.plan.microbatches)

    def _even_stages(self) -> Iterator[Trial]:
        """Stages that take as long as the mean of them, if one takes longer."""
        table = self.costs.of(FORWARD, self.plan) + self.costs.of(BACKWARD, self.plan)
        pieces = self.program.pieces
        each = of_whole(table, pieces).mean(1)
        worst, mean = int(each.argmax()), float(each.mean())
        if not mean or each[worst] <= 1.01 * mean:
            return
        told = self.costs.told
        even = {name: evened(c, pieces) for name, c in told.items() if name in _WORK}
        first, last = sum(pieces[:worst]), sum(pieces[: worst + 1]) - 1
        holders = " and ".join(map(str, self.plan.holders[:, first].tolist()))
        which = f"stage {first}" if first == last else f"stage of pieces {first} to {last}"
        what = (
            f"stages that all take the mean ({which} on rank {holders} takes "
            f"{each[worst] / mean:.2f}x)"
        )
        yield self._priced(what, **even)

    def _free(self, what: str) -> Iterator[Trial]:
        if what != _SUMMED or self.program.meets:
            costs = (*_FREE[what], *["gather"] * (what == _GATHERED[self.program.sequence]))
            yield self._priced(f"{what} that take no time", **dict.fromkeys(costs, 0.0))

    def _filled_sums(self) -> Iterator[Trial]:
        """The same pieces in an order that computes while they are summed."""
        if not self.program.meets or len(self.program) > LARGE:
            return  # and where sums are free, `fill` refuses
        for which in ("W", "F", "all"):
            program = self.lowering.of(compute_of(self.program), self.costs, fill=which)
            run = self._run(program, self.costs)
            if run.span <= self.base.span * (1 - LEAST):
                what = f"fill={which}, which computes while pieces are summed"
                yield Trial(what + self._instead(run), run, self.plan.microbatches)

    def _other_transfers(self) -> Iterator[Trial]:
        """The same compute with the transfers that the lowering gives it."""
        if self._best_anew is not None:
            yield self._best_anew

    def _grouped_transfers(self) -> Iterator[Trial]:
        """The same with opposite transfers issued as one, if that is better by what is of worth."""
        alone = self._best_anew
        least = self.base.span if alone is None else alone.run.span
        grouped = self._anew(overlap=True)
        if grouped is not None and grouped.run.span <= least * (1 - LEAST):
            yield grouped

    @cached_property
    def _best_anew(self) -> Trial | None:
        return self._anew(overlap=False)

    def _anew(self, *, overlap: bool) -> Trial | None:
        """The compute lowered anew, in the better of two orders: that of usual costs, and of these.

        None where the program is too large, or none of both finishes under the model.
        """
        best: Trial | None = None
        if len(self.program) > LARGE:
            return best
        for costs in (None, rounded(self.costs)):
            try:
                program = self.lowering.of(compute_of(self.program), costs, overlap=overlap)
                run = self._run(program, self.costs)
            except ProgramError:
                continue
            if best is None or run.span < (1 - 1e-9) * best.run.span:
                what = "the same compute with other transfers"
                if _besides(program) != _besides(self.program):
                    what += " and reductions"
                what += ", opposite ones grouped" * overlap + self._instead(run)
                best = Trial(what, run, self.plan.microbatches, Anew(program, costs, overlap))
        return best

    def _instead(self, run: Timeline) -> str:
        """The time that the whole takes, and has taken."""
        unit = self.base.unit and f" {self.base.unit}"
        return f": {run.span:.4g} instead of {self.base.span:.4g}{unit}"

    def _free_queues(self) -> Iterator[Trial]:
        """The same program where no message waits behind one that goes elsewhere."""
        if self.base.model != "edge":
            run = simulate(self.program, self.costs, model="edge", blocks=self.base.blocks)
            what = f"the same program with a communicator per edge{self._instead(run)}"
            yield Trial(what, run, self.plan.microbatches)

    def _more_microbatches(self) -> Iterator[Trial]:
        """Twice as many, of a schedule that is known."""
        if self.schedule is not None and len(self.program) <= LARGE:
            whole, costs = self.program.whole, _twice(self.costs)
            drafted = draft(self.schedule, replace(whole, microbatches=2 * whole.microbatches))
            program = self.lowering.of(cut_like(drafted, self.program), costs)
            run, many = self._run(program, costs), program.plan.microbatches
            yield Trial("twice as many microbatches of this size", run, many)

    def _other_schedules(self) -> Iterator[Trial]:
        """The built-in schedules that hold no more activations."""
        if len(self.program) > LARGE:
            return
        for name, schedule in built_in().items():
            placement, fixed = placed_for(schedule)
            whole = self.program.whole
            most = {1, whole.stages_per_rank}
            for v in {fixed} if fixed else most:
                try:
                    plan = Plan(
                        self.plan.ranks, whole.microbatches, v, placement or "loop",
                        self.plan.updates, delay_for(schedule) or 0, self.plan.segments,
                    )  # fmt: skip
                    if plan.rows != self.plan.rows:  # it would hold the model more often
                        continue
                    drafted = cut_like(draft(schedule, plan), self.program)
                    costs = self._cut_into(drafted.plan.stages)
                    program = self.lowering.of(drafted, costs)
                    run = self._run(program, costs)
                except ProgramError:
                    continue
                fits = run.peak_activations <= self.room
                if program.trains == self.program.trains and fits and name != self.program.name:
                    what = f"{name} with {v} stage{'s' * (v > 1)} per rank"
                    what += ", which holds no more activations"
                    if _I in program.ops and _I not in self.program.ops:
                        what += "; I and W each half of B"
                    yield Trial(what, run, drafted.plan.microbatches)

    def _cut_into(self, stages: int) -> Costs:
        """Costs of the same model in another number of stages, each as long as the others."""
        now = {name: c for name, c in self.costs.told.items() if name in OF_A_STAGE}
        own = self.plan.stages
        return replace(self.costs, **{k: cut(c, own, stages) for k, c in now.items()})

    def _greedy_orders(self) -> Iterator[Trial]:
        """Greedy orders: with as many activations on each rank, and with one more if there is any.

        What a greedy order saves with as many, it saves by its order.
        """
        if len(self.program) > LARGE or not self.program.trains:
            return
        peak = self.base.peak_in_flight
        most = [np.count_nonzero(s.op == FORWARD) for s in self.program.streams]
        best = self.base.span
        for more, what in (
            (0, "a greedy order, which holds no more activations"),
            (1, "one more activation in flight on each rank, in greedy order"),
        ):
            if more and (peak == most).all():
                return
            run = self._greedy((peak + more).tolist())
            if run.span < best:
                best = run.span
                yield Trial(what, run, self.plan.microbatches)

    def _greedy(self, in_flight: list[int]) -> Timeline:
        letters = "IFW" if _I in self.program.ops else "BF"
        drafted = greedy(
            self.plan, letters, in_flight.__getitem__, self.costs, frozen=self.program.frozen
        )
        program = self.lowering.of(drafted, self.costs)
        return self._run(program, self.costs)
