"""Resolve a source and its options into a program, costs and sizes.

The command line creates a Request from its options. A training run creates a Request from its
configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from schedir.analysis.progress_models import MODELS, ProgressModel, require_model
from schedir.compiler.compile import check_memory, compile
from schedir.compiler.relower import adapt_options, extract_compute, infer_options
from schedir.errors import ShapeError, UsageError
from schedir.io.option_spelling import option_name
from schedir.io.source_loader import Source
from schedir.ir.cost.cluster import Cluster
from schedir.ir.cost.costs import Costs
from schedir.ir.cost.sizes import Sizes
from schedir.ir.isa.instructions import FORM_CHANGE_OPS, FORMS, INSTRUCTIONS, RECOMPUTE
from schedir.ir.pipeline.field_schema import Field
from schedir.ir.pipeline.pipeline_shape import SHAPE_FIELDS, PipelineShape
from schedir.ir.pipeline.stage_segments import (
    STAGE_END,
    TP_LETTERS,
    UnsegmentedShape,
    has_collectives,
    merge_segments,
)
from schedir.ir.program import ATTRIBUTE_FIELDS, HEADER_FIELDS, WORD_DTYPE, Program
from schedir.passes.memory.buffer_sharing import share_slots
from schedir.passes.memory.offload_placement import DISK_TRIP, HOST_TRIP
from schedir.passes.pass_types import BufferSharing
from schedir.passes.splitting.stage_segmentation import (
    CostsOrSizes,
    divide_over_stages,
    parse_segment_letters,
    redistribute_values,
    split_costs,
    split_shape,
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


def _refuse_forms_with_sizes(program: Program, sizes: Sizes) -> None:
    """Raise UsageError if messages change to a form that has a size in `sizes`.

    `--cluster` does not use this size.
    """
    for op in program.used_opcodes & {*FORM_CHANGE_OPS}:
        size = FORMS[INSTRUCTIONS[op].form or 0].size
        if size and getattr(sizes, size) is not None:
            raise UsageError(
                "--cluster computes the cost of a message from the size of an activation or a "
                f"gradient, but {INSTRUCTIONS[op].text} changes the bytes of the message to the "
                f"size {size}",
                hint="give the cost of messages: --costs send=SECONDS",
                fields=["cluster", "costs"],
            )


@dataclass(frozen=True)
class Request:
    """A source and the options with which its program is compiled or predicted.

    By default, a lowered program in a file is not changed. For an option that contradicts this
    program, the request raises the error that `make_conflict_error` returns. `lower_drafts` and
    `relower` allow options that change the program.

    Args:
        source: The schedule, program or run.
        specified: The fields of the shape and of the program that the user set, by name.
        defaults: Values for the fields of a schedule's shape that are not in `specified`. `ranks`
            and `microbatches` must be in `specified` or in `defaults`.
        costs: Costs of a prediction, per stage and microbatch. None uses the defaults of `Costs`.
        cluster: The cluster for computing the costs that `costs` does not specify, in seconds.
        sizes: Sizes of a prediction, per stage and microbatch.
        progress_model: The progress model. None means that the user did not set a progress model.
        blocking_hosts: The argument `blocking_hosts` of `compile`.
        overlap: The argument `overlap` of `compile`.
        buffer_sharing: The argument `buffer_sharing` of `compile`. None means that the user did not
            set this option.
        memory_limit: The largest number of bytes that a rank may use. None means no limit.
        compile_options: Other options of `compile`, by name.
        draft: True if `program` is the draft, without communication.
        lower_drafts: Lower a draft in a file, with the attributes in `specified`. If the file has a
            lowered program, change only the slots of its values, as `buffer_sharing` requires.
        relower: Extract the compute of any program in a file, and lower it again. Options that are
            not set are inferred from the file, except `overlap`. If the file has a run, `timeline`
            is then a prediction with `costs`, or with the mean times of the run if `costs` is None.
        for_comparison: Compare schedules of one model that may have different numbers of stages.
            `costs`, `sizes`, `frozen_stages` and `stage_segments` are then values for a model with
            one stage per rank. `costs` and `sizes` may also be lists with one entry per stage, for
            any number of stages. All these values are converted to the stages of the shape.
            `stages_per_rank` is ignored for a schedule that cannot use it.
        unit: The unit of `costs`, as in `Timeline`.
        make_conflict_error: A function of the source, the field, the value in the file and the
            specified value. It returns the error to raise.

    Raises:
        UsageError: The progress model is unknown.
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
    unit: str = ""
    make_conflict_error: Callable[[str, Field, str, str], UsageError] = field(
        default=_make_conflict_error
    )

    def __post_init__(self) -> None:
        if self.progress_model is not None:
            require_model(self.progress_model)

    # ------------------------------------------------------------ resolved values

    @property
    def source_timeline(self) -> Timeline | None:
        """The run in a file, or None if the source is not a run."""
        return self.source.timeline

    @property
    def schedule(self) -> Schedule | None:
        """The schedule, or None if the source is a program or a run."""
        source_object = self.source.schedule_or_program
        return None if isinstance(source_object, Program) else source_object

    @cached_property
    def shape(self) -> PipelineShape:
        """The shape of the program in a file, or the shape for which a schedule is expanded.

        Raises:
            ShapeError: The shape is invalid.
            UsageError: The options contradict a file.
        """
        source_object = self.source.schedule_or_program
        if isinstance(source_object, Program):
            self._require_consistent_source(source_object)
            return source_object.shape
        return self._find_shape(source_object)

    @property
    def traits(self) -> dict[str, Any]:
        """The program attributes that the user set: name -> value. Shape fields are not included.

        Raises:
            ShapeError: Schedules are compared, and the frozen part of the model is not an integer
                number of stages.
        """
        attributes = {
            f.name: self.specified[f.name] for f in ATTRIBUTE_FIELDS if f.name in self.specified
        }
        if self.for_comparison and attributes.get("frozen_stages"):
            attributes["frozen_stages"] = self._count_frozen_stages(
                attributes["frozen_stages"], self.shape
            )
        return attributes

    def _count_frozen_stages(self, parts: int, segmented_shape: PipelineShape) -> int:
        """Return the number of stages in the first `parts` parts of a model.

        The model has one part per rank.
        """
        shape, segments, _ = self._find_unsegmented_shape(segmented_shape)
        frozen_parts, remainder = divmod(parts * shape.stages, shape.ranks)
        if remainder:
            raise ShapeError(
                f"frozen_stages={parts} freezes {parts}/{shape.ranks} of the model, but "
                f"{parts}/{shape.ranks} of the {shape.stages} stages is not an integer",
                fields=["frozen_stages", "stages_per_rank"],
            )
        return sum(segments[:frozen_parts])

    @cached_property
    def program(self) -> Program:
        """The compiled and checked program of a schedule, or the program of a file.

        The options `draft`, `lower_drafts` and `relower` of the request change this program.

        Raises:
            SchedirError: The program or an option is invalid.
        """
        shape, source_object = self.shape, self.source.schedule_or_program
        options = dict[str, Any]()
        if not isinstance(source_object, Program):
            if not self.draft:  # Refuse a large shape before the schedule is expanded.
                # All built-in schedules except `forward_only` have a backward. Whether a user's
                # schedule has a backward is unknown here.
                training_schedules = [
                    s for name, s in get_built_in_schedules().items() if name != "forward_only"
                ]
                has_backward = getattr(source_object, "func", source_object) in training_schedules
                shape.require_lowered_limit(
                    has_backward=has_backward and not self.specified.get("frozen_stages")
                )
            source_object = expand_schedule(source_object, shape)
        elif self.relower:
            draft = replace(extract_compute(source_object), **self.traits)
            options = infer_options(source_object, self._resolved_progress_model, draft)
            source_object = draft
        elif not self.lower_drafts:
            return (
                source_object
                if self.memory_limit is None
                else self._check_memory_limit(check(source_object, self.proven_progress_model))
            )
        elif not source_object.is_draft:
            for name in self.compile_options:
                raise UsageError(
                    f"{self.source} is a lowered program: {name} applies only to schedules and "
                    "drafts",
                    fields=[name],
                )
            return self._check_memory_limit(self._share_buffers(source_object))
        source_object = replace(source_object, **self.traits)
        if self.draft:
            self._require_compute_only()
            return source_object
        options |= {"overlap": self.overlap, **self.compile_options}
        if self.for_comparison:  # Adapt the options to the number of stages of this schedule.
            options = adapt_options(options | self._segment_options, source_object.shape)
        if self.buffer_sharing is not None:
            options["buffer_sharing"] = self.buffer_sharing
        return compile(
            source_object,
            progress_model=self._resolved_progress_model,
            blocking_hosts=self.blocking_hosts
            or (self.source_timeline is not None and self.source_timeline.blocking_hosts),
            costs=self.stage_costs,
            sizes=self._stage_sizes,
            memory_limit=self.memory_limit,
            **options,
        )

    @property
    def specified_costs(self) -> Costs | None:
        """The costs of each stage, or None if the user gave neither costs nor a cluster."""
        return None if self.costs is None and self.cluster is None else self.stage_costs

    @property
    def cluster_costs(self) -> Costs:
        """The costs that the cluster computes, without the costs that the user set."""
        user_costs = self._split_over_stages(self.costs or Costs()).specified
        all_costs = self.stage_costs.specified if self.cluster is not None else {}
        return Costs(**{name: cost for name, cost in all_costs.items() if name not in user_costs})

    @cached_property
    def timeline(self) -> Timeline:
        """The prediction for the program, or the run in a file.

        If `prediction_costs` is not None, a prediction with these costs replaces the run in a file.
        The prediction has the unit of the run.

        Raises:
            UsageError: An option contradicts the run.
            SchedirError: The program is invalid, or exceeds `memory_limit`.
        """
        source_run = self.source_timeline
        if source_run is None:
            costs, sizes = self.program_costs, self._stage_sizes
            model, blocking_hosts = self._resolved_progress_model, self.blocking_hosts
            run = simulate(
                self.program,
                costs,
                progress_model=model,
                sizes=sizes,
                blocking_hosts=blocking_hosts,
            )
            return replace(run, unit=self.unit if self.cluster is None else "s")
        if self.cluster is not None:
            raise UsageError(
                f"{self.source} is a run with its own times: --cluster applies only to programs "
                "and schedules",
                fields=["cluster"],
            )
        if self.progress_model not in (None, source_run.progress_model) and not self.for_comparison:
            raise UsageError(
                f"{self.source} is a run with the progress model {source_run.progress_model}, so "
                f"the progress model {self.progress_model} does not apply",
                fields=["progress_model"],
            )
        self._require_consistent_source(source_run.program)
        sizes = self._stage_sizes or source_run.sizes
        program = self.program if self.relower else source_run.program
        prediction_costs = self.prediction_costs
        if self.memory_limit is not None:
            check_memory(program, sizes, self.memory_limit)
        if prediction_costs is not None:
            prediction = simulate(
                program,
                prediction_costs,
                progress_model=source_run.progress_model,
                blocking_hosts=source_run.blocking_hosts,
            )
            source_run = replace(prediction, unit=source_run.unit)
        return replace(source_run, sizes=sizes)

    @cached_property
    def prediction_costs(self) -> Costs | None:
        """The costs of each stage for predicting `timeline`.

        None if `timeline` is the run in a file.
        """
        source_run = self.source_timeline
        if source_run is None:
            return self.program_costs
        costs = None if self.for_comparison else self.costs
        if costs is None and self.relower:
            costs = fill_missing_backwards(calibrate(source_run), source_run.program)
        return costs

    @property
    def _resolved_progress_model(self) -> ProgressModel:
        """The progress model that the user set, or else the default.

        With `relower`, the default is the model of the run in the file. Otherwise it is
        "per_device".
        """
        default = (
            self.source_timeline.progress_model
            if self.relower and self.source_timeline is not None
            else "per_device"
        )
        return self.progress_model or default

    @property
    def proven_progress_model(self) -> ProgressModel:
        """The specified progress model, or else "per_device".

        If the program of a run is proven free of deadlock only under other models, the default is
        one of these models.
        """
        proven_models = (
            {proof.progress_model for proof in self.source_timeline.program.proofs}
            if self.source_timeline
            else {"per_device"}
        )
        models = [model for model in MODELS if model in proven_models]
        return self.progress_model or (
            "per_device" if "per_device" in models or not models else models[0]
        )

    # ------------------------------------------------------------ helpers

    def _find_shape(self, schedule: Schedule) -> PipelineShape:
        """Return the shape that the user set, with the defaults of the schedule.

        In a comparison, `stages_per_rank` is ignored for a schedule that cannot use it.
        """
        values = dict(self.defaults) | dict(self.specified)
        placement, is_fixed = get_placement_mark(schedule)
        is_loop = (values.get("placement") or placement or "loop") == "loop"
        if self.for_comparison and (is_fixed or (is_loop and not has_free_v(schedule))):
            values.pop("stages_per_rank", None)
        shape = PipelineShape(**{f.name: values[f.name] for f in SHAPE_FIELDS if f.name in values})
        return apply_schedule_defaults(schedule, shape).resolve_defaults()

    def _require_consistent_source(self, program: Program) -> None:
        """Raise the conflict error if an option contradicts the program in a file."""
        for f in HEADER_FIELDS:
            is_changeable = (
                self.relower or (self.lower_drafts and program.is_draft)
            ) and not f.is_shape_field
            is_split = self.for_comparison and f.name in ("stages_per_rank", "placement")
            if f.name not in self.specified or is_changeable or is_split:
                continue
            specified = f.field_type.resolve(f.name, self.specified[f.name], program.shape)
            actual = f.get_value(program)
            # In a comparison, the user counts microbatches before their division into chunks.
            if self.for_comparison and f.name == "microbatches":
                actual = program.unsegmented_shape.microbatches
            counts_parts = self.for_comparison and f.name == "frozen_stages"
            if (
                self._count_frozen_stages(specified, program.shape) if counts_parts else specified
            ) != actual:
                actual_text, specified = (
                    f.field_type.to_text(value, program.shape) for value in (actual, specified)
                )
                raise self.make_conflict_error(self.source, f, actual_text, specified)
        if not (self.lower_drafts or self.relower):
            options = [
                name for name in ("draft", "overlap", "buffer_sharing") if getattr(self, name)
            ]
            for name in (*options, *self.compile_options):
                option = "--compute-only" if name == "draft" else option_name(name)
                raise UsageError(
                    f"{self.source} is a program: {option} applies only to schedules", fields=[name]
                )

    def _require_compute_only(self) -> None:
        """Raise UsageError if a draft is requested together with an option for lowering."""
        for name in (
            *(n for n in ("overlap", "buffer_sharing") if getattr(self, n)),
            *self.compile_options,
        ):
            raise UsageError(
                f"--compute-only prints a draft, but {option_name(name)} applies only to lowered "
                "programs",
                hint="leave out --compute-only",
                fields=[name],
            )

    def _share_buffers(self, program: Program) -> Program:
        """Check a lowered program, and let its values share slots as `buffer_sharing` requires."""
        program = check(program, self._resolved_progress_model, blocking_hosts=self.blocking_hosts)
        if self.buffer_sharing is None:
            return program
        program = share_slots(
            program, self.buffer_sharing, self.stage_costs, self._resolved_progress_model
        )
        return check(program, self._resolved_progress_model, blocking_hosts=self.blocking_hosts)

    def _check_memory_limit(self, program: Program) -> Program:
        """Return the program. If there is a memory limit, first check that the program fits."""
        return (
            program
            if self.memory_limit is None
            else check_memory(program, self._stage_sizes, self.memory_limit)
        )

    @cached_property
    def stage_costs(self) -> Costs:
        """The costs of each stage for a prediction.

        The cluster computes the cost of an offload as if no activation were recomputed.
        """
        return self._fill_costs(())

    @cached_property
    def program_costs(self) -> Costs:
        """The costs of each stage for the compiled program.

        An offload of a recomputed microbatch moves only the saved inputs. The cluster computes the
        cost of this offload from the size of these inputs.
        """
        program = self.program
        if self.cluster is not None and "send" not in (self.costs or Costs()).specified:
            _refuse_forms_with_sizes(program, self.sizes or Sizes())
        if self.cluster is None or not {RECOMPUTE, HOST_TRIP.offload_op} <= program.used_opcodes:
            return self.stage_costs
        is_recompute = program.op == RECOMPUTE
        stage, mb = (
            program.words.view(WORD_DTYPE)[name][is_recompute].tolist() for name in ("stage", "mb")
        )
        return self._fill_costs([*zip(stage, mb, strict=True)])

    def _fill_costs(self, recomputed: Collection[tuple[int, int]]) -> Costs:
        costs = self.costs or Costs()
        if self.cluster is None:
            return self._split_over_stages(costs.with_defaults())
        source_object, unsegmented = self.source.schedule_or_program, self._unsegmented_shape
        if "microbatch_chunks" in self.compile_options or unsegmented.chunks_per_microbatch > 1:
            raise UsageError(
                "--cluster cannot compute the costs of microbatch chunks",
                hint="leave out --cluster, and give all costs with --costs",
                fields=["cluster", "microbatch_chunks", "chunks_per_microbatch"],
            )
        shape, costs = self.shape, self._split_over_stages(costs)
        groups: dict[str, Any] = {"tp": 1, "dp": 1, "ep": 1, "zero": 0}
        groups |= {"checkpoint_snapshots": False, "segment_boundaries": ""}
        groups |= {"optimizer_placement": "device"}
        for f in ATTRIBUTE_FIELDS:
            if f.name in groups:
                value = (
                    f.get_value(source_object)
                    if isinstance(source_object, Program)
                    else groups[f.name]
                )
                groups[f.name] = self.specified.get(f.name, value)
        letters = groups.pop("segment_boundaries")
        if (segments := self.compile_options.get("stage_segments")) is not None:
            segments = self._segment_options.get("stage_segments", segments)
            stage_letters = parse_segment_letters(segments, shape)
            letters = STAGE_END.join(stage_letters)
            shape = split_shape(shape, np.array([len(cuts) + 1 for cuts in stage_letters]))
        if (
            groups["tp"] > 1
            and has_collectives(letters, TP_LETTERS)
            and "tp_reduce" not in costs.specified
        ):
            raise UsageError(
                "--cluster cannot compute the cost of tensor-parallel collectives between segments",
                hint="--costs tp_reduce=SECONDS",
                fields=["cluster", "stage_segments", "segment_boundaries"],
            )
        ops = source_object.used_opcodes if isinstance(source_object, Program) else frozenset[int]()
        for name, op in (
            ("offload", HOST_TRIP.offload_op),
            ("offload_to_disk", DISK_TRIP.offload_op),
        ):
            groups[name] = self.compile_options.get(name) is not None or op in ops
        return self.cluster.fill_costs(
            shape, self._stage_sizes, costs, **groups, recomputed=recomputed
        )

    @property
    def _stage_sizes(self) -> Sizes | None:
        return self.sizes and self._split_over_stages(self.sizes)

    def _split_over_stages(self, values: CostsOrSizes) -> CostsOrSizes:
        """Convert costs or sizes for one stage per rank to the stages and chunks of the program.

        Without `for_comparison`, the values are already per stage, and are returned unchanged.
        """
        if not self.for_comparison:
            return values
        shape, segments, chunks = self._unsegmented_shape
        segments = self._segment_options.get("stage_segments", segments)
        chunks = chunks * self.compile_options.get("microbatch_chunks", 1)
        values = redistribute_values(values, shape.ranks, shape.stages)
        return split_costs(values, segments, shape, chunks=chunks)

    @property
    def _unsegmented_shape(self) -> UnsegmentedShape:
        return self._find_unsegmented_shape(self.shape)

    def _find_unsegmented_shape(self, shape: PipelineShape) -> UnsegmentedShape:
        """Return the shape before stages are split into segments and microbatches into chunks.

        The segment boundaries and the number of chunks are those that the user set, or else those
        of the program.
        """
        program = (
            self.source.schedule_or_program
            if isinstance(self.source.schedule_or_program, Program)
            else Program
        )
        boundaries, chunks = (
            f.field_type.resolve(
                f.name, self.specified.get(f.name, getattr(program, f.name)), shape
            )
            for f in ATTRIBUTE_FIELDS
            if f.name in ("segment_boundaries", "chunks_per_microbatch")
        )
        return merge_segments(shape, boundaries, chunks)

    @property
    def _segment_options(self) -> dict[str, Any]:
        """The option `stage_segments`, converted to values per stage, or {} if it is not set."""
        segments, shape = self.compile_options.get("stage_segments"), self.shape
        if segments is not None and max(self._unsegmented_shape.segments_per_stage) > 1:
            raise UsageError(
                f"stage_segments does not apply: the stages of {self.source} already have segments",
                fields=["stage_segments"],
            )
        return (
            {}
            if segments is None
            else {"stage_segments": divide_over_stages(segments, shape.ranks, shape.stages)}
        )
