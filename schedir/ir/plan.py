"""Plan: the shape of a pipeline.  Who holds which stage, and how many microbatches flow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from functools import cached_property
from operator import index
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from schedir.errors import PlanError
from schedir.ir.fields import Kind, fields_of, itself, setting, whole_number, whole_numbers
from schedir.ir.numerals import NO_NUMBERS, whole
from schedir.ir.ops import ROWS, Per

MAX_MICROBATCHES = 2**20
MAX_STAGES = 2**15
MAX_CELLS = 2**27  # stages x microbatches; a program has at least two instructions in each


def _loop(rank: int, local: int, ranks: int) -> int:
    return local * ranks + rank


def _vee(rank: int, local: int, ranks: int) -> int:
    """Down the ranks and back, again and again: rank r holds r, 2P-1-r, 2P+r, ..."""
    return local * ranks + (ranks - 1 - rank if local % 2 else rank)


PLACEMENTS = {"loop": _loop, "vee": _vee}


def _read_placement(text: str) -> str | tuple[int, ...]:
    try:
        return whole_numbers(text)
    except ValueError:
        if text[:1].isdigit():
            raise ValueError(f"{_NAME}, not {text!r}") from None
        return text  # a name


def _read_delay(text: str) -> int | tuple[int, ...]:
    try:
        return whole_numbers(text) if "," in text else whole(text)
    except ValueError:
        raise ValueError(f"{_NUMBERS}, not {text!r}") from None


def _show(value: str | int | tuple[int, ...], _: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


# How the fields of a plan are said.
_NAME = "is a name or ranks like 0,1,1,0"
_NUMBERS = "must be a whole number, or one per stage like 2,1,0"
_RANKS = setting(
    whole_number(1, MAX_STAGES), "pipeline ranks ({ranks})", always=True, digest=itself
)
_MICROBATCHES = setting(
    whole_number(1, MAX_MICROBATCHES), "{per_rank} per rank", always=True, digest=itself
)
_STAGES_PER_RANK = setting(
    whole_number(1, MAX_STAGES),
    "1, or 2 for a schedule with a parameter v",
    always=True,
    digest=lambda _, __: (),  # the holders of the stages say it
)
_PLACEMENT = setting(
    Kind(_NAME, _read_placement, str | tuple[int, ...], show=_show, metavar="WHERE"),
    "loop, vee, mirror, or ranks like 0,1,1,0",
    always=True,
    digest=lambda _, plan: (plan.holders.tolist(),),
)
_UPDATES = setting(whole_number(1, MAX_MICROBATCHES), "updates without a flush (1)", digest=itself)
_DELAY = setting(
    Kind(_NUMBERS, _read_delay, int | tuple[int, ...], show=_show),
    "updates by which weights are old; or 2,1,0",
    beside="updates",
    digest=itself,
)


@dataclass(frozen=True, repr=False)
class Plan:
    """The shape of the pipeline.

    `placement` is "loop" (rank r holds j*ranks + r), "vee" (r and 2*ranks-1-r; it has two
    stages per rank unless told otherwise), or the rank of each stage in turn; from such a map
    `stages_per_rank` is read off as the most stages that a rank holds.  A Plan knows no schedule:
    with "loop" there is one stage per rank unless told, also for one with a parameter `v`, to which
    commands and configurations then give its default of `v`, or two.

    "mirror" gives each stage two holders, for DualPipe and Chimera: the one that "loop" gives it
    for half as many stages per rank, and that one's mirror image, ranks-1-r.  The first half of
    the microbatches goes down the ranks, from first holder to first holder; the rest goes up,
    from mirror image to mirror image.

    With several `updates` there is no flush between them: the first `microbatches / updates`
    microbatches make update 0, the next ones update 1.  A microbatch of update u uses, forward
    and backward, the weights after max(u - delay, 0) updates.  `delay` may be one number per
    stage.

    Raises PlanError for anything that no pipeline can have, before anything is built.

    >>> from schedir import Plan
    >>> Plan(ranks=2, microbatches=8, stages_per_rank=2).stages_of
    ((0, 2), (1, 3))
    >>> Plan(ranks=2, microbatches=8, placement="vee").stages_of
    ((0, 3), (1, 2))
    >>> Plan(ranks=2, microbatches=8, placement=(0, 1, 1)).stages_of
    ((0,), (1, 2))
    >>> Plan(ranks=2, microbatches=0)
    Traceback (most recent call last):
        ...
    schedir.errors.PlanError: microbatches must be from 1 to 1048576, not 0
    """

    ranks: int = field(metadata=_RANKS)
    microbatches: int = field(metadata=_MICROBATCHES)
    stages_per_rank: int = field(default=1, metadata=_STAGES_PER_RANK)
    placement: str | tuple[int, ...] = field(default="loop", metadata=_PLACEMENT)
    updates: int = field(default=1, metadata=_UPDATES)
    delay: int | tuple[int, ...] = field(default=0, metadata=_DELAY)

    def __post_init__(self) -> None:
        for f in PLAN:
            value = f.kind.settle(f.name, getattr(self, f.name), None)
            object.__setattr__(self, f.name, value)
        if isinstance(self.placement, str):
            if self.placement not in PLACEMENTS and not self.two_way:
                raise PlanError(
                    f"placement must be 'loop', 'vee', 'mirror' or the rank of each stage, "
                    f"not {self.placement!r}",
                    fields=["placement"],
                )
            if self.placement != "loop" and self.stages_per_rank == 1:
                object.__setattr__(self, "stages_per_rank", 2)
            if self.two_way:
                self._check_mirror()
        else:
            self._read_map(self.placement)
        if self.stages > MAX_STAGES:
            raise PlanError(
                f"{self.stages} stages are more than the {MAX_STAGES} allowed",
                fields=["ranks", "stages_per_rank", "placement"],
            )
        if self.stages * self.microbatches > MAX_CELLS:
            raise PlanError(
                f"{self.stages} stages x {self.microbatches} microbatches are more than the "
                f"{MAX_CELLS} cells allowed",
                fields=["microbatches", "ranks", "stages_per_rank", "placement"],
            )
        self._check_updates()

    def __repr__(self) -> str:
        said = {f.name: getattr(self, f.name) for f in fields(self)}
        usual = {f.name: f.default for f in fields(self)}
        told = (f"{name}={value!r}" for name, value in said.items() if value != usual[name])
        return f"Plan({', '.join(told)})"

    def _read_map(self, given: Iterable[int]) -> None:
        try:
            if isinstance(given, NO_NUMBERS):
                raise TypeError
            placement = tuple(index(r) for r in given)
        except TypeError:
            raise PlanError(
                f"placement must be 'loop', 'vee', 'mirror' or the rank of each stage, "
                f"not {given!r}",
                fields=["placement"],
            ) from None
        held = Counter(placement)
        for stage, rank in enumerate(placement):
            if not 0 <= rank < self.ranks:
                raise PlanError(
                    f"placement puts stage {stage} on rank {rank}, but the ranks are "
                    f"0 to {self.ranks - 1}",
                    fields=["placement", "ranks"],
                )
        for rank in range(self.ranks):
            if rank not in held:
                raise PlanError(
                    f"placement gives rank {rank} no stage", fields=["placement", "ranks"]
                )
        most = max(held.values())
        if self.stages_per_rank not in (1, most):
            raise PlanError(
                f"placement puts up to {most} stages on a rank, but stages_per_rank is "
                f"{self.stages_per_rank}",
                fields=["placement", "stages_per_rank"],
            )
        object.__setattr__(self, "placement", placement)
        object.__setattr__(self, "stages_per_rank", most)

    def _check_mirror(self) -> None:
        for name in ("ranks", "stages_per_rank"):
            if getattr(self, name) % 2:
                raise PlanError(
                    f"placement 'mirror' pairs ranks and their stages: {name} must be even, "
                    f"not {getattr(self, name)}",
                    fields=["placement", name],
                )
        if self.microbatches < 2:
            raise PlanError(
                "placement 'mirror' takes two microbatches at least, one each way",
                fields=["placement", "microbatches"],
            )

    def _check_updates(self) -> None:
        if self.microbatches % self.updates:
            raise PlanError(
                f"{self.microbatches} microbatches cannot be divided among {self.updates} updates",
                fields=["microbatches", "updates"],
            )
        if self.two_way and self.updates > 1:
            raise PlanError(
                "placement 'mirror' goes with one update", fields=["placement", "updates"]
            )
        try:
            if isinstance(self.delay, NO_NUMBERS):
                raise TypeError
            if isinstance(self.delay, Iterable):
                delay: int | tuple[int, ...] = tuple(index(d) for d in self.delay)
            else:
                delay = index(self.delay)
        except TypeError:
            raise PlanError(
                f"delay must be a whole number or one per stage, not {self.delay!r}",
                fields=["delay"],
            ) from None
        each = delay if isinstance(delay, tuple) else (delay,)
        if isinstance(delay, tuple) and len(delay) != self.stages:
            raise PlanError(
                f"delay has {len(delay)} numbers for {self.stages} stages", fields=["delay"]
            )
        for d in each:
            if not 0 <= d < MAX_MICROBATCHES:
                raise PlanError(
                    f"delay must be from 0 to {MAX_MICROBATCHES - 1}, not {d}", fields=["delay"]
                )
        if len({*each}) == 1:
            delay = each[0]
        if delay != 0 and self.updates == 1:
            raise PlanError(
                f"delay is {delay}, but there is one update, with nothing to be behind",
                fields=["delay", "updates"],
            )
        object.__setattr__(self, "delay", delay)

    @property
    def per_update(self) -> int:
        """How many microbatches make an update."""
        return self.microbatches // self.updates

    def version(self, stage: ArrayLike, mb: ArrayLike) -> NDArray[np.int64]:
        """After how many updates the weights are that each stage uses for each microbatch."""
        delay = np.asarray(self.delay)
        lag = delay[np.asarray(stage)] if delay.ndim else delay
        return np.asarray(np.maximum(np.asarray(mb, np.int64) // self.per_update - lag, 0))

    @property
    def two_way(self) -> bool:
        """Whether each stage has two holders, and microbatches go both ways."""
        return self.placement == "mirror"

    @property
    def held_by_a_rank(self) -> str:
        """How many stages a rank holds, in words."""
        each = {*map(len, self.stages_of)}
        most = f"{max(each)} stage{'s' * (max(each) > 1)} per rank"
        return most if len(each) == 1 else f"up to {most}"

    @cached_property
    def stages(self) -> int:
        """How many stages the model is cut into."""
        if isinstance(self.placement, str):
            return self.ranks * self.stages_per_rank // (1 + self.two_way)
        return len(self.placement)

    @cached_property
    def room(self) -> int:
        """The most instructions that a program can have without one that is there twice."""
        each = {
            Per.MICROBATCH: self.stages * self.microbatches,
            Per.STAGE: self.stages * (1 + self.two_way) * self.updates,
            Per.RANK: self.ranks * self.updates,
            Per.TURN: self.stages * (1 + self.two_way) * self.microbatches,
        }
        return sum(each[row.per] for row in ROWS)

    @cached_property
    def rank_of(self) -> NDArray[np.int64]:
        """The rank that holds each stage, shape (stages,); of two holders the first."""
        if isinstance(self.placement, str):
            place = PLACEMENTS.get(self.placement, _loop)
            held = [
                (place(r, j, self.ranks), r)
                for j in range(self.stages // self.ranks)
                for r in range(self.ranks)
            ]
            ranks = np.array([r for _, r in sorted(held)], np.int64)
        else:
            ranks = np.array(self.placement, np.int64)
        ranks.flags.writeable = False
        return ranks

    @cached_property
    def holders(self) -> NDArray[np.int64]:
        """The ranks that hold each stage, shape (1, stages), or (2, stages) if two do."""
        ranks = self.rank_of[None]
        holders = np.concatenate([ranks, self.ranks - 1 - ranks]) if self.two_way else ranks
        holders.flags.writeable = False
        return holders

    @property
    def down(self) -> int:
        """How many microbatches go down the ranks: the first ones.  The others go up."""
        return (self.microbatches + 1) // 2 if self.two_way else self.microbatches

    def rank_at(self, stage: ArrayLike, mb: ArrayLike) -> NDArray[np.int64]:
        """The rank on which each stage runs each microbatch, in the shape of the two."""
        first = np.asarray(self.rank_of[np.asarray(stage)])
        if not self.two_way:
            return first
        return np.where(np.asarray(mb) < self.down, first, self.ranks - 1 - first)

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank, ascending: `F[j]` of rank r is stage `stages_of[r][j]`."""
        held: list[list[int]] = [[] for _ in range(self.ranks)]
        for stage, ranks in enumerate(self.holders.T.tolist()):
            for rank in ranks:
                held[rank].append(stage)
        return tuple(map(tuple, held))

    @cached_property
    def local_of(self) -> NDArray[np.int64]:
        """Which of its rank's own stages each stage is, from 0, shape (stages,).

        Two holders of a stage are mirror images, and agree.
        """
        local = np.empty(self.stages, np.int64)
        for own in self.stages_of:
            local[list(own)] = np.arange(len(own))
        local.flags.writeable = False
        return local


PLAN: Final = fields_of(Plan, of_plan=True)
