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
from schedir.compiler.relower import adapt_options, extract_compute, infer_options
from schedir.errors import ShapeError, UsageError
from schedir.io.command_line import option_name
from schedir.io.source_loader import Source
from schedir.ir.cost.cluster import Cluster
from schedir.ir.cost.costs import Costs
from schedir.ir.cost.per_stage_values import redistribute_stages
from schedir.ir.cost.sizes import Sizes
from schedir.ir.isa.instructions import RECOMPUTE
from schedir.ir.pipeline.field_schema import Field
from schedir.ir.pipeline.pipeline_shape import SHAPE_FIELDS, PipelineShape
from schedir.ir.pipeline.stage_segments import UnsegmentedShape, merge_segments
from schedir.ir.program import ATTRIBUTE_FIELDS, HEADER_FIELDS, WORD_DTYPE, Program
from schedir.passes.memory.buffer_sharing import share_slots
from schedir.passes.memory.offload_placement import DISK_TRIP, HOST_TRIP
from schedir.passes.pass_types import BufferSharing
from schedir.passes.splitting.stage_segmentation import (
    SHARED_FIELDS,
    divide_over_stages,
    split_costs,
)
from schedir.predict.calibrate import calibrate, fill_missing_backwards
from schedir.predict.simulate import simulate
from schedir.predict.timeline import Timeline
from schedir.schedules import get_built_in_schedules
from schedir.schedules.schedule_algebra import (
    Schedule,
    apply_schedule_defaults,
    get_placement_mark,
    has_free_v,
)
from schedir.schedules.schedule_expansion import expand_schedule
from schedir.verify.check import check


def _make_conflict_error(source: str, field: Field, actual: str, specified: str) -> UsageError:
    return UsageError(f"{source} has {field.name} {actual}, not {specified}", fields=[field.name])


@dataclass(frozen=True)
class Request:
    """A source, and how its program is wanted.  Each property is found when it is first asked for.

    `specified` are the fields of the shape and the program that somebody said, by name; what nobody
    said the source decides, or `defaults`, which has at least `ranks` and `microbatches`.
    `fill_costs`,
    `sizes` and `progress_model` are those of a prediction, `overlap`, `buffer_sharing`,
    `memory_limit`,
    `blocking_hosts` and `compile_options` as `compile` takes them; None is what nobody said.
    `compute_only` asks for the compute only.

    A program in a file is taken as it is, and what contradicts it is refused, by
    `contradicts(source, field, has, said)`.  With `lower_drafts` a draft in a file is lowered, with
    the traits that are said, and values of a lowered program share the slots that are asked for.
    With
    `relower` any program in a file is a draft to be lowered, of its compute alone: as it was
    lowered where nobody says otherwise, but for `overlap`.  Of a run that is a prediction, at the
    run's mean times unless there are `fill_costs`.

    A `cluster` fills costs that nobody told, for this shape, in seconds.

    `for_comparison` is for comparing schedules of one model: costs and sizes are a rank's, or those
    of any number of stages, and are spread evenly over the stages of the shape; only schedules that
    take
    `v`, or are for several, have several.  What is frozen is said in parts of which there are as
    many as ranks, then, and so is what is cut.
    """

    source: Source
    specified: Mapping[str, Any]
    defaults: Mapping[str, Any]
    costs: Costs | None = None
    cluster: Cluster | None = None
    sizes: Sizes | None = None
    progress_model: ProgressModel | None = None
    blocking_hosts: bool = False
    overlap: bool = False
    buffer_sharing: BufferSharing | None = None
    memory_limit: float | None = None
    compile_options: Mapping[str, Any] = field(default_factory=dict)
    draft: bool = False
    lower_drafts: bool = False
    relower: bool = False
    for_comparison: bool = False
    make_conflict_error: Callable[[str, Field, str, str], UsageError] = field(
        default=_make_conflict_error
    )

    def __post_init__(self) -> None:
        if self.progress_model is not None:
            require_model(self.progress_model)

    # ------------------------------------------------------------ what is resolved

    @property
    def source_timeline(self) -> Timeline | None:
        """The run in a file, if the source is one."""
        return self.source.timeline

    @property
    def schedule(self) -> Schedule | None:
        """The schedule, if the source is one."""
        found = self.source.schedule_or_program
        return None if isinstance(found, Program) else found

    @cached_property
    def shape(self) -> PipelineShape:
        """The shape of the program in a file, or that on which a schedule is drafted.

        Raises ShapeError for one that cannot be, UsageError for one that contradicts a file.
        """
        found = self.source.schedule_or_program
        if isinstance(found, Program):
            self._require_consistent_source(found)
            return found.shape
        return self._find_shape(found)

    @property
    def traits(self) -> dict[str, Any]:
        """What somebody said of the program beside its shape.

        Raises ShapeError where schedules are compared, and what is frozen is no number of stages.
        """
        said = {
            f.name: self.specified[f.name] for f in ATTRIBUTE_FIELDS if f.name in self.specified
        }
        if self.for_comparison and said.get("frozen_stages"):
            said["frozen_stages"] = self._count_frozen_stages(said["frozen_stages"], self.shape)
        return said

    def _count_frozen_stages(self, parts: int, segmented_shape: PipelineShape) -> int:
        """How many stages of a program are frozen, where of each rank's part so many are."""
        shape, pieces, _ = self._find_unsegmented_shape(segmented_shape)
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
        shape, found, how = self.shape, self.source.schedule_or_program, dict[str, Any]()
        if not isinstance(found, Program):
            if not self.draft:  # refuse what is too large before the schedule is called
                # A schedule may have no backwards: of built-in ones all but `forward_only` have.
                training = [
                    s for name, s in get_built_in_schedules().items() if name != "forward_only"
                ]
                trains = getattr(found, "func", found) in training
                shape.require_lowered_limit(
                    has_backward=trains and not self.specified.get("frozen_stages")
                )
            found = expand_schedule(found, shape)
        elif self.relower:
            again = replace(extract_compute(found), **self.traits)
            how, found = infer_options(found, self._resolved_progress_model, again), again
        elif not self.lower_drafts:
            return (
                found
                if self.memory_limit is None
                else self._check_memory_limit(check(found, self.proven_progress_model))
            )
        elif not found.is_draft:
            for name in self.compile_options:
                raise UsageError(
                    f"{self.source} has its transfers: {name} is for what is compiled",
                    fields=[name],
                )
            return self._check_memory_limit(self._share_buffers(found))
        found = replace(found, **self.traits)
        if self.draft:
            self._require_compute_only()
            return found
        how |= {"overlap": self.overlap, **self.compile_options}
        if self.for_comparison:  # schedules of other numbers of stages
            how = adapt_options(how | self._segment_options, found.shape)
        if self.buffer_sharing is not None:
            how["buffer_sharing"] = self.buffer_sharing
        return compile(
            found,
            progress_model=self._resolved_progress_model,
            blocking_hosts=self.blocking_hosts
            or (self.source_timeline is not None and self.source_timeline.blocking_hosts),
            costs=self.stage_costs,
            sizes=self._stage_sizes,
            memory_limit=self.memory_limit,
            **how,
        )

    @property
    def specified_costs(self) -> Costs | None:
        """Costs of stages, those told and those that a cluster fills; None where there are none."""
        return None if self.costs is None and self.cluster is None else self.stage_costs

    @property
    def cluster_costs(self) -> Costs:
        """The costs that the cluster fills."""
        told = self._split_over_stages(self.costs or Costs()).specified
        own = self.stage_costs.specified if self.cluster is not None else {}
        return Costs(**{name: cost for name, cost in own.items() if name not in told})

    @cached_property
    def timeline(self) -> Timeline:
        """The predicted run of the program, which is checked, or the run in a file.

        With `fill_costs` it is the prediction of the program of a run, in the unit of that.
        """
        found = self.source_timeline
        if found is None:
            costs, sizes = self.program_costs, self._stage_sizes
            model, blocks = self._resolved_progress_model, self.blocking_hosts
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
        if self.progress_model not in (None, found.progress_model) and not self.for_comparison:
            raise UsageError(
                f"{self.source} ran under {found.progress_model}, not {self.progress_model}",
                fields=["progress_model"],
            )
        if self.blocking_hosts and not found.blocking_hosts:
            raise UsageError(
                f"{self.source} ran on hosts that do not block", fields=["blocking_hosts"]
            )
        self._require_consistent_source(found.program)
        sizes = self._stage_sizes or found.sizes
        program = self.program if self.relower else found.program
        given = self.prediction_costs
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
    def prediction_costs(self) -> Costs | None:
        """The costs of each stage at which `timeline` is predicted; None for a run as it is."""
        found = self.source_timeline
        if found is None:
            return self.program_costs
        given = None if self.for_comparison else self.costs
        if given is None and self.relower:
            given = fill_missing_backwards(calibrate(found), found.program)
        return given

    @property
    def _resolved_progress_model(self) -> ProgressModel:
        """The progress model that is said, else that of a run that is lowered anew, or device."""
        own = (
            self.source_timeline.progress_model
            if self.relower and self.source_timeline is not None
            else "per_device"
        )
        return self.progress_model or own

    @property
    def proven_progress_model(self) -> ProgressModel:
        """The progress model that is said, else device, or that of a run whose program it is."""
        proven = (
            {proof.progress_model for proof in self.source_timeline.program.proofs}
            if self.source_timeline
            else {"per_device"}
        )
        own = [model for model in MODELS if model in proven]
        return self.progress_model or ("per_device" if "per_device" in own or not own else own[0])

    # ------------------------------------------------------------ how

    def _find_shape(self, schedule: Schedule) -> PipelineShape:
        """Return the shape that the user gives, with the defaults of the schedule.

        A comparison (`for_comparison`) ignores stages per rank that a schedule cannot have.
        """
        values = dict(self.defaults) | dict(self.specified)
        mark, fixed = get_placement_mark(schedule)
        loop = (values.get("placement") or mark or "loop") == "loop"
        if self.for_comparison and (fixed or (loop and not has_free_v(schedule))):
            values.pop("stages_per_rank", None)
        given = PipelineShape(**{f.name: values[f.name] for f in SHAPE_FIELDS if f.name in values})
        return apply_schedule_defaults(schedule, given).resolve_defaults()

    def _require_consistent_source(self, program: Program) -> None:
        """Refuse what contradicts the program in a file."""
        for f in HEADER_FIELDS:
            free = (
                self.relower or (self.lower_drafts and program.is_draft)
            ) and not f.is_shape_field
            split = self.for_comparison and f.name in ("stages_per_rank", "placement")
            if f.name not in self.specified or free or split:
                continue
            said, found = (
                f.field_type.resolve(f.name, self.specified[f.name], program.shape),
                f.get_value(program),
            )
            if (
                self.for_comparison and f.name == "microbatches"
            ):  # whole ones, as schedules have them
                found = program.unsegmented_shape.microbatches
            of_parts = self.for_comparison and f.name == "frozen_stages"
            if (self._count_frozen_stages(said, program.shape) if of_parts else said) != found:
                has, said = (f.field_type.to_text(value, program.shape) for value in (found, said))
                raise self.make_conflict_error(self.source, f, has, said)
        if not (self.lower_drafts or self.relower):
            own = [name for name in ("draft", "overlap", "buffer_sharing") if getattr(self, name)]
            for name in (*own, *self.compile_options):
                option = "--compute-only" if name == "draft" else option_name(name)
                raise UsageError(
                    f"{self.source} is a program: {option} is for schedules", fields=[name]
                )

    def _require_compute_only(self) -> None:
        """Refuse, of a draft, what says how it is lowered."""
        for name in (
            *(n for n in ("overlap", "buffer_sharing") if getattr(self, n)),
            *self.compile_options,
        ):
            raise UsageError(
                f"a draft is what is computed, before it is lowered: {option_name(name)} is "
                "for what is lowered",
                hint="leave out --compute-only",
                fields=[name],
            )

    def _share_buffers(self, program: Program) -> Program:
        """A lowered program, checked, whose values share the slots that are asked for."""
        program = check(program, self._resolved_progress_model, blocking_hosts=self.blocking_hosts)
        if self.buffer_sharing is None:
            return program
        program = share_slots(
            program, self.buffer_sharing, self.stage_costs, self._resolved_progress_model
        )
        return check(program, self._resolved_progress_model, blocking_hosts=self.blocking_hosts)

    def _check_memory_limit(self, program: Program) -> Program:
        """A checked program, within the limit if there is one."""
        return (
            program
            if self.memory_limit is None
            else check_memory(program, self._stage_sizes, self.memory_limit)
        )

    @cached_property
    def stage_costs(self) -> Costs:
        """The costs of a prediction, those of each stage; of moves as if nothing was recomputed."""
        return self._fill_costs(())

    @cached_property
    def program_costs(self) -> Costs:
        """The same for the program: what is recomputed moves its checkpoint."""
        program = self.program
        if self.cluster is None or not {RECOMPUTE, HOST_TRIP.offload_op} <= program.used_opcodes:
            return self.stage_costs
        at = program.op == RECOMPUTE
        stage, mb = (program.words.view(WORD_DTYPE)[name][at].tolist() for name in ("stage", "mb"))
        return self._fill_costs([*zip(stage, mb, strict=True)])

    def _fill_costs(self, recomputed: Collection[tuple[int, int]]) -> Costs:
        costs = self.costs or Costs()
        if self.cluster is None:
            return self._split_over_stages(costs.with_defaults())
        found, told = self.source.schedule_or_program, self._unsegmented_shape
        finer = {"stage_segments", "microbatch_chunks"} & self.compile_options.keys()
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
        costs = self._split_over_stages(costs)
        groups: dict[str, Any] = {"tp": 1, "dp": 1, "zero": 0, "checkpoint_snapshots": False}
        groups |= {"optimizer_placement": "device"}
        for f in ATTRIBUTE_FIELDS:
            if f.name in groups:
                own = f.get_value(found) if isinstance(found, Program) else groups[f.name]
                groups[f.name] = self.specified.get(f.name, own)
        ops = found.used_opcodes if isinstance(found, Program) else frozenset[int]()
        for name, op in (
            ("offload", HOST_TRIP.offload_op),
            ("offload_to_disk", DISK_TRIP.offload_op),
        ):
            groups[name] = self.compile_options.get(name) is not None or op in ops
        return self.cluster.fill_costs(
            self.shape, self._stage_sizes, costs, **groups, recomputed=recomputed
        )

    @property
    def _stage_sizes(self) -> Sizes | None:
        return self.sizes and self._split_over_stages(self.sizes)

    def _split_over_stages(self, values: _CostsOrSizes) -> _CostsOrSizes:
        """Costs or sizes of a microbatch on a rank as those on one of its stages."""
        if not self.for_comparison:
            return values
        shape, pieces, chunks = self._unsegmented_shape
        pieces, chunks = (
            self._segment_options.get("stage_segments", pieces),
            chunks * self.compile_options.get("microbatch_chunks", 1),
        )
        shared = {k: c for k in SHARED_FIELDS if (c := getattr(values, k, None)) is not None}
        values = replace(
            values,
            **{k: redistribute_stages(c, shape.ranks, shape.stages) for k, c in shared.items()},
        )
        return split_costs(values, pieces, shape, chunks=chunks)

    @property
    def _unsegmented_shape(self) -> UnsegmentedShape:
        return self._find_unsegmented_shape(self.shape)

    def _find_unsegmented_shape(self, shape: PipelineShape) -> UnsegmentedShape:
        """What a shape's stages and microbatches are pieces and chunks of, as a program in a file
        says, or somebody of it, or of a schedule."""
        found = (
            self.source.schedule_or_program
            if isinstance(self.source.schedule_or_program, Program)
            else Program
        )
        meets, chunked = (
            f.field_type.resolve(f.name, self.specified.get(f.name, getattr(found, f.name)), shape)
            for f in ATTRIBUTE_FIELDS
            if f.name in ("segment_boundaries", "chunks_per_microbatch")
        )
        return merge_segments(shape, meets, chunked)

    @property
    def _segment_options(self) -> dict[str, Any]:
        """Of schedules that are compared the pieces of stages: what is said is a rank's."""
        said, shape = self.compile_options.get("stage_segments"), self.shape
        if said is not None and max(self._unsegmented_shape.segments_per_stage) > 1:
            raise UsageError(
                "stages are pieces already, and are not cut again", fields=["stage_segments"]
            )
        return (
            {}
            if said is None
            else {"stage_segments": divide_over_stages(said, shape.ranks, shape.stages)}
        )


_CostsOrSizes = TypeVar("_CostsOrSizes", Costs, Sizes)
