"""Resolve what a user asks for, a source and all options, into programs, costs and sizes.

The command line makes a Request of its options, a training run of its configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from schedir.analysis.progress_models import MODELS, ProgressModel, require_model
from schedir.compiler.compile import check_memory, compile
from schedir.compiler.relower import compute_of, fitting, options_of
from schedir.errors import ShapeError, UsageError
from schedir.io.command_line import option_name
from schedir.io.source_loader import Source
from schedir.ir.cost.cluster import Cluster
from schedir.ir.cost.costs import Costs
from schedir.ir.cost.per_stage_values import cut
from schedir.ir.cost.sizes import Sizes
from schedir.ir.isa.instructions import RECOMPUTE
from schedir.ir.pipeline.field_schema import Field
from schedir.ir.pipeline.pipeline_shape import SHAPE_FIELDS, PipelineShape
from schedir.ir.pipeline.stage_segments import UnsegmentedShape, whole_of
from schedir.ir.program import FIELDS, HEADER, TRAITS, Program
from schedir.passes.memory.buffer_sharing import share_slots
from schedir.passes.memory.offload_placement import DISK, HOST
from schedir.passes.pass_types import BufferSharing
from schedir.passes.splitting.stage_segmentation import SHARED, over_stages, split_costs
from schedir.predict.calibrate import calibrate, completed
from schedir.predict.simulate import simulate
from schedir.predict.timeline import Timeline
from schedir.schedules import built_in
from schedir.schedules.schedule_algebra import Schedule, placed_for, shape_for, takes_v
from schedir.schedules.schedule_expansion import expand_schedule
from schedir.verify.check import check


def _contradicts(source: str, field: Field, has: str, said: str) -> UsageError:
    return UsageError(f"{source} has {field.name} {has}, not {said}", fields=[field.name])


@dataclass(frozen=True)
class Request:
    """A source, and how its program is wanted.  Each property is found when it is first asked for.

    `said` are the fields of the shape and the program that somebody said, by name; what nobody said
    the source decides, or `usual`, which has at least `ranks` and `microbatches`.  `costs`, `sizes`
    and `progress_model` are those of a prediction, `overlap`, `buffer_sharing`, `memory_limit`,
    `blocking_hosts` and `more` as `compile` takes them; None is what nobody said.  `draft` asks for
    the compute only.

    A program in a file is taken as it is, and what contradicts it is refused, by
    `contradicts(source, field, has, said)`.  With `lowers` a draft in a file is lowered, with the
    traits that are said, and values of a lowered program share the slots that are asked for.  With
    `relower` any program in a file is a draft to be lowered, of its compute alone: as it was
    lowered where nobody says otherwise, but for `overlap`.  Of a run that is a prediction, at the
    run's mean times unless there are `costs`.

    A `cluster` fills costs that nobody told, for this shape, in seconds.

    `share` is for comparing schedules of one model: costs and sizes are a rank's, or those of any
    number of stages, and are spread evenly over the stages of the shape; only schedules that take
    `v`, or are for several, have several.  What is frozen is said in parts of which there are as
    many as ranks, then, and so is what is cut.
    """

    source: Source
    said: Mapping[str, Any]
    usual: Mapping[str, Any]
    costs: Costs | None = None
    cluster: Cluster | None = None
    sizes: Sizes | None = None
    progress_model: ProgressModel | None = None
    blocking_hosts: bool = False
    overlap: bool = False
    buffer_sharing: BufferSharing | None = None
    memory_limit: float | None = None
    more: Mapping[str, Any] = field(default_factory=dict)
    draft: bool = False
    lowers: bool = False
    relower: bool = False
    share: bool = False
    contradicts: Callable[[str, Field, str, str], UsageError] = field(default=_contradicts)

    def __post_init__(self) -> None:
        if self.progress_model is not None:
            require_model(self.progress_model)

    # ------------------------------------------------------------ what is resolved

    @property
    def run(self) -> Timeline | None:
        """The run in a file, if the source is one."""
        return self.source.run

    @property
    def schedule(self) -> Schedule | None:
        """The schedule, if the source is one."""
        found = self.source.found
        return None if isinstance(found, Program) else found

    @cached_property
    def shape(self) -> PipelineShape:
        """The shape of the program in a file, or that on which a schedule is drafted.

        Raises ShapeError for one that cannot be, UsageError for one that contradicts a file.
        """
        found = self.source.found
        if isinstance(found, Program):
            self._agree(found)
            return found.shape
        return self._plan_for(found)

    @property
    def traits(self) -> dict[str, Any]:
        """What somebody said of the program beside its shape.

        Raises ShapeError where schedules are compared, and what is frozen is no number of stages.
        """
        said = {f.name: self.said[f.name] for f in TRAITS if f.name in self.said}
        if self.share and said.get("frozen_stages"):
            said["frozen_stages"] = self._frozen(said["frozen_stages"], self.shape)
        return said

    def _frozen(self, parts: int, own: PipelineShape) -> int:
        """How many stages of a program are frozen, where of each rank's part so many are."""
        shape, pieces, _ = self._whole_of(own)
        frozen, rest = divmod(parts * shape.stages, shape.ranks)
        if rest:
            raise ShapeError(
                f"{parts} of {shape.ranks} parts of the model are frozen, and with "
                f"{shape.stages} stages that is no number of them",
                fields=["frozen_stages", "stages_per_rank"],
            )
        return sum(pieces[:frozen])

    @cached_property
    def program(self) -> Program:
        """The program: a schedule's compiled and so checked, one in a file as it is.

        Raises a SchedirError for one that is wrong.
        """
        shape, found, how = self.shape, self.source.found, dict[str, Any]()
        if not isinstance(found, Program):
            if not self.draft:  # refuse what is too large before the schedule is called
                # A schedule may have no backwards: of built-in ones all but `forward_only` have.
                training = [s for name, s in built_in().items() if name != "forward_only"]
                trains = getattr(found, "func", found) in training
                shape.require_room_lowered(trains=trains and not self.said.get("frozen_stages"))
            found = expand_schedule(found, shape)
        elif self.relower:
            again = replace(compute_of(found), **self.traits)
            how, found = options_of(found, self._model, again), again
        elif not self.lowers:
            return (
                found
                if self.memory_limit is None
                else self._within(check(found, self.proven_model))
            )
        elif not found.is_draft:
            for name in self.more:
                raise UsageError(
                    f"{self.source} has its transfers: {name} is for what is compiled",
                    fields=[name],
                )
            return self._within(self._with_slots(found))
        found = replace(found, **self.traits)
        if self.draft:
            self._require_compute()
            return found
        how |= {"overlap": self.overlap, **self.more}
        if self.share:  # schedules of other numbers of stages
            how = fitting(how | self._cut, found.shape)
        if self.buffer_sharing is not None:
            how["buffer_sharing"] = self.buffer_sharing
        return compile(
            found,
            progress_model=self._model,
            blocking_hosts=self.blocking_hosts
            or (self.run is not None and self.run.blocking_hosts),
            costs=self.stage_costs,
            sizes=self._stage_sizes,
            memory_limit=self.memory_limit,
            **how,
        )

    @property
    def given(self) -> Costs | None:
        """Costs of stages, those told and those that a cluster fills; None where there are none."""
        return None if self.costs is None and self.cluster is None else self.stage_costs

    @property
    def filled(self) -> Costs:
        """The costs that the cluster fills."""
        told = self._per_stage(self.costs or Costs()).told
        own = self.stage_costs.told if self.cluster is not None else {}
        return Costs(**{name: cost for name, cost in own.items() if name not in told})

    @cached_property
    def timeline(self) -> Timeline:
        """The predicted run of the program, which is checked, or the run in a file.

        With `costs` it is the prediction of the program of a run, in the unit of that.
        """
        found = self.run
        if found is None:
            costs, sizes = self.run_costs, self._stage_sizes
            model, blocks = self._model, self.blocking_hosts
            run = simulate(
                self.program, costs, progress_model=model, sizes=sizes, blocking_hosts=blocks
            )
            return run if self.cluster is None else replace(run, unit="s")
        if self.cluster is not None:
            raise UsageError(
                f"{self.source} is a run, which has its own times: a cluster fills those of "
                "programs and schedules",
                fields=["cluster"],
            )
        if self.progress_model not in (None, found.progress_model) and not self.share:
            raise UsageError(
                f"{self.source} ran under {found.progress_model}, not {self.progress_model}",
                fields=["progress_model"],
            )
        if self.blocking_hosts and not found.blocking_hosts:
            raise UsageError(
                f"{self.source} ran on hosts that do not block", fields=["blocking_hosts"]
            )
        self._agree(found.program)
        sizes = self._stage_sizes or found.sizes
        program = self.program if self.relower else found.program
        given = self.priced
        if self.memory_limit is not None:
            check_memory(program, sizes, self.memory_limit)
        if given is not None:
            predicted = simulate(
                program,
                given,
                progress_model=found.progress_model,
                blocking_hosts=found.blocking_hosts,
            )
            found = replace(predicted, unit=found.unit)
        return replace(found, sizes=sizes)

    @cached_property
    def priced(self) -> Costs | None:
        """The costs of each stage at which `timeline` is predicted; None for a run as it is."""
        found = self.run
        if found is None:
            return self.run_costs
        given = None if self.share else self.costs
        if given is None and self.relower:
            given = completed(calibrate(found), found.program)
        return given

    @property
    def _model(self) -> ProgressModel:
        """The progress model that is said, else that of a run that is lowered anew, or device."""
        own = self.run.progress_model if self.relower and self.run is not None else "per_device"
        return self.progress_model or own

    @property
    def proven_model(self) -> ProgressModel:
        """The progress model that is said, else device, or that of a run whose program it is."""
        proven = (
            {proof.progress_model for proof in self.run.program.proofs}
            if self.run
            else {"per_device"}
        )
        own = [model for model in MODELS if model in proven]
        return self.progress_model or ("per_device" if "per_device" in own or not own else own[0])

    # ------------------------------------------------------------ how

    def _plan_for(self, schedule: Schedule) -> PipelineShape:
        """Return the shape that the user gives, with the defaults of the schedule.

        A comparison (`share`) ignores stages per rank that a schedule cannot have.
        """
        values = dict(self.usual) | dict(self.said)
        mark, fixed = placed_for(schedule)
        loop = (values.get("placement") or mark or "loop") == "loop"
        if self.share and (fixed or (loop and not takes_v(schedule))):
            values.pop("stages_per_rank", None)
        given = PipelineShape(**{f.name: values[f.name] for f in SHAPE_FIELDS if f.name in values})
        return shape_for(schedule, given).resolved()

    def _agree(self, program: Program) -> None:
        """Refuse what contradicts the program in a file."""
        for f in HEADER:
            free = (self.relower or (self.lowers and program.is_draft)) and not f.of_plan
            split = self.share and f.name in ("stages_per_rank", "placement")
            if f.name not in self.said or free or split:
                continue
            said, found = f.kind.settle(f.name, self.said[f.name], program.shape), f.of(program)
            if self.share and f.name == "microbatches":  # whole ones, as schedules have them
                found = program.whole.microbatches
            of_parts = self.share and f.name == "frozen_stages"
            if (self._frozen(said, program.shape) if of_parts else said) != found:
                has, said = (f.kind.show(value, program.shape) for value in (found, said))
                raise self.contradicts(self.source, f, has, said)
        if not (self.lowers or self.relower):
            own = [name for name in ("draft", "overlap", "buffer_sharing") if getattr(self, name)]
            for name in (*own, *self.more):
                option = "--compute-only" if name == "draft" else option_name(name)
                raise UsageError(
                    f"{self.source} is a program: {option} is for schedules", fields=[name]
                )

    def _require_compute(self) -> None:
        """Refuse, of a draft, what says how it is lowered."""
        for name in (*(n for n in ("overlap", "buffer_sharing") if getattr(self, n)), *self.more):
            raise UsageError(
                f"a draft is what is computed, before it is lowered: {option_name(name)} is "
                "for what is lowered",
                hint="leave out --compute-only",
                fields=[name],
            )

    def _with_slots(self, program: Program) -> Program:
        """A lowered program, checked, whose values share the slots that are asked for."""
        program = check(program, self._model, blocking_hosts=self.blocking_hosts)
        if self.buffer_sharing is None:
            return program
        program = share_slots(program, self.buffer_sharing, self.stage_costs, self._model)
        return check(program, self._model, blocking_hosts=self.blocking_hosts)

    def _within(self, program: Program) -> Program:
        """A checked program, within the limit if there is one."""
        return (
            program
            if self.memory_limit is None
            else check_memory(program, self._stage_sizes, self.memory_limit)
        )

    @cached_property
    def stage_costs(self) -> Costs:
        """The costs of a prediction, those of each stage; of moves as if nothing was recomputed."""
        return self._priced(())

    @cached_property
    def run_costs(self) -> Costs:
        """The same for the program: what is recomputed moves its checkpoint."""
        program = self.program
        if self.cluster is None or not {RECOMPUTE, HOST.there} <= program.ops:
            return self.stage_costs
        at = program.op == RECOMPUTE
        stage, mb = (program.words.view(FIELDS)[name][at].tolist() for name in ("stage", "mb"))
        return self._priced([*zip(stage, mb, strict=True)])

    def _priced(self, recomputed: Collection[tuple[int, int]]) -> Costs:
        costs = self.costs or Costs()
        if self.cluster is None:
            return self._per_stage(costs.usual())
        found, told = self.source.found, self._whole
        finer = {"stage_segments", "microbatch_chunks"} & self.more.keys()
        if told.shape != self.shape:
            finer |= (
                {"chunks_per_microbatch"}
                if told.shape.stages == self.shape.stages
                else {"segment_boundaries"}
            )
        if finer:
            raise UsageError(
                "a cluster fills costs of whole stages and microbatches, and these are cut",
                hint="tell costs of pieces, sum among them",
                fields=["cluster", *finer],
            )
        costs = self._per_stage(costs)
        groups: dict[str, Any] = {"tp": 1, "dp": 1, "zero": 0, "checkpoint_snapshots": False}
        groups |= {"optimizer_placement": "device"}
        for f in TRAITS:
            if f.name in groups:
                own = f.of(found) if isinstance(found, Program) else groups[f.name]
                groups[f.name] = self.said.get(f.name, own)
        ops = found.ops if isinstance(found, Program) else frozenset[int]()
        for name, op in (("offload", HOST.there), ("offload_to_disk", DISK.there)):
            groups[name] = self.more.get(name) is not None or op in ops
        return self.cluster.costs(
            self.shape, self._stage_sizes, costs, **groups, recomputed=recomputed
        )

    @property
    def _stage_sizes(self) -> Sizes | None:
        return self.sizes and self._per_stage(self.sizes)

    def _per_stage(self, each: _Each) -> _Each:
        """Costs or sizes of a microbatch on a rank as those on one of its stages."""
        if not self.share:
            return each
        shape, pieces, chunks = self._whole
        pieces, chunks = (
            self._cut.get("stage_segments", pieces),
            chunks * self.more.get("microbatch_chunks", 1),
        )
        shared = {k: c for k in SHARED if (c := getattr(each, k, None)) is not None}
        each = replace(each, **{k: cut(c, shape.ranks, shape.stages) for k, c in shared.items()})
        return split_costs(each, pieces, shape, chunks=chunks)

    @property
    def _whole(self) -> UnsegmentedShape:
        return self._whole_of(self.shape)

    def _whole_of(self, shape: PipelineShape) -> UnsegmentedShape:
        """What a shape's stages and microbatches are pieces and chunks of, as a program in a file
        says, or somebody of it, or of a schedule."""
        found = self.source.found if isinstance(self.source.found, Program) else Program
        meets, chunked = (
            f.kind.settle(f.name, self.said.get(f.name, getattr(found, f.name)), shape)
            for f in TRAITS
            if f.name in ("segment_boundaries", "chunks_per_microbatch")
        )
        return whole_of(shape, meets, chunked)

    @property
    def _cut(self) -> dict[str, Any]:
        """Of schedules that are compared the pieces of stages: what is said is a rank's."""
        said, shape = self.more.get("stage_segments"), self.shape
        if said is not None and max(self._whole.pieces) > 1:
            raise UsageError(
                "stages are pieces already, and are not cut again", fields=["stage_segments"]
            )
        return (
            {} if said is None else {"stage_segments": over_stages(said, shape.ranks, shape.stages)}
        )


_Each = TypeVar("_Each", Costs, Sizes)
