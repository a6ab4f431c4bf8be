"""A property test for schedules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from schedir.analysis.progress_models import MODELS, ProgressModel
from schedir.call_errors import explain_wrong_calls
from schedir.compiler.compile import compile
from schedir.errors import SchedirError, UsageError, describe, require_type
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.schedules.schedule_algebra import Schedule, get_schedule_name
from schedir.testing.strategies import shapes_for
from schedir.verify.check import check

_SHAPES_EXAMPLE = "shapes=[PipelineShape(ranks=2, microbatches=4)]"


@explain_wrong_calls("assert_schedule(schedule)")
def assert_schedule(
    schedule: Schedule,
    *,
    shapes: st.SearchStrategy[PipelineShape] | Iterable[PipelineShape] | None = None,
    progress_models: Sequence[ProgressModel] = MODELS,
    bitwise: bool | None = None,
    max_examples: int = 50,
) -> None:
    """Assert that a schedule is correct on many shapes.

    A schedule is correct on a shape if all of this is true:

    - It compiles, it is complete, and it finishes under each of `progress_models`.
    - A tiny model has the same loss and gradients as without a pipeline.  The program runs in this
      process, in a random legal order of its instructions.

    If a program has several optimizer steps, the gradients of the last step are compared.  The
    steps do not change the weights.

    Args:
        schedule: The schedule.
        shapes: Shapes, or a strategy of shapes.  None means the shapes of `shapes_for(schedule)`.
        progress_models: The progress models under which the schedule must finish.  The default is
            all progress models.
        bitwise: True requires equal bits for all gradients.  False allows a relative error of 1e-6
            for each parameter: the norm of the difference over the norm of the gradient.  None, the
            default, requires equal bits if the program reduces gradients in ascending order of
            microbatches, and otherwise allows the error.
        max_examples: The number of shapes that are tried if `shapes` is a strategy.

    Raises:
        AssertionError: The schedule is wrong on a shape.  The message contains the problem and the
            first wrong shape, or the smallest wrong shape that hypothesis found.
        UsageError: There is no shape to try, or a shape or a progress model is invalid.

    Example:
        >>> from schedir import PipelineShape, schedules
        >>> from schedir.testing import assert_schedule
        >>> assert_schedule(schedules.zb_h1, shapes=[PipelineShape(ranks=2, microbatches=4)])
    """
    progress_models = _require_progress_models(progress_models)

    def require_correct(shape: PipelineShape, seed: int) -> None:
        program = _compile_checked(schedule, shape, progress_models)
        difference = _describe_difference(program, progress_models[0], seed, bitwise)
        if difference:
            raise AssertionError(f"{program.name} is wrong on {shape}\n{difference}")

    if isinstance(shapes, st.SearchStrategy):
        run_examples = given(shape=shapes, seed=st.integers(0, 2**32 - 1))(require_correct)
        # The output of hypothesis's explain phase does not help to find the error.
        phases = [phase for phase in Phase if phase is not Phase.explain]
        # A database would replay the failures of one schedule for the next one.
        settings(max_examples=max_examples, deadline=None, phases=phases, database=None)(
            run_examples
        )()
        return
    if shapes is not None and not isinstance(shapes, Iterable):
        # One shape is treated as a list with this shape.
        require_type(shapes, "shapes", PipelineShape, _SHAPES_EXAMPLE)
    shape_list = shapes_for(schedule) if shapes is None else shapes
    shape_list = [shape_list] if isinstance(shape_list, PipelineShape) else list(shape_list)
    if not shape_list:
        raise UsageError("shapes is empty: a schedule needs at least one shape")
    for index, shape in enumerate(shape_list):
        require_type(shape, f"shapes[{index}]", PipelineShape, _SHAPES_EXAMPLE)
    for seed, shape in enumerate(shape_list):
        require_correct(shape, seed)


def _require_progress_models(value: object) -> tuple[ProgressModel, ...]:
    """Return the progress models as a tuple; one model is treated as a list with this model."""
    models: object = [value] if isinstance(value, str) else value
    result = tuple(models) if isinstance(models, Iterable) else (models,)
    if not result or any(model not in MODELS for model in result):
        raise UsageError(
            f"progress_models must be one or more of {', '.join(map(repr, MODELS))}, not "
            f"{describe(value)}",
            fields=["progress_models"],
        )
    return result


def _compile_checked(
    schedule: Schedule, shape: PipelineShape, progress_models: Sequence[ProgressModel]
) -> Program:
    """Return the program of a schedule after `check` accepted it under every progress model."""
    model = progress_models[0]
    try:
        program = compile(schedule, shape.resolve_defaults(), progress_model=model)
        for model in progress_models:
            check(program, model)
    except SchedirError as error:
        raise AssertionError(
            f"{get_schedule_name(schedule)} is refused on {shape} under progress model {model!r}\n"
            f"{type(error).__name__}: {error}"
        ) from error
    return program


def _describe_difference(
    program: Program, progress_model: ProgressModel, seed: int, bitwise: bool | None
) -> str:
    """Return the difference of a run from the sequential reference, or ""."""
    import torch

    from schedir.runtime.boundaries.boundary import Boundary
    from schedir.runtime.in_process import InProcessExecutor
    from schedir.runtime.sequential_reference import run_sequential
    from schedir.testing.tiny_model import make_batch, make_tiny_stages, squared_error

    shape = program.shape
    inputs, targets = make_batch(shape.microbatches, seed)
    plain_stages, stages = (make_tiny_stages(shape.stages, seed) for _ in range(2))
    boundary = Boundary(tuple(inputs.shape[1:]), inputs.dtype)
    executor = InProcessExecutor(
        program, stages, loss=squared_error, boundary=boundary, progress_model=progress_model
    )
    total_loss = executor.step(inputs, targets, order_seed=seed)
    plain_loss = run_sequential(plain_stages, inputs, targets, loss=squared_error)
    if not torch.equal(total_loss, plain_loss):
        return "the loss differs from that of the sequential reference"
    if not program.has_backward:
        return ""
    if shape.optimizer_steps > 1:  # only the gradients of the last update remain
        last_update = slice(-shape.microbatches_per_update, None)
        run_sequential(plain_stages, inputs[last_update], targets[last_update], loss=squared_error)
    needs_equal_bits = program.reduces_in_microbatch_order if bitwise is None else bitwise
    for stage, (module, plain_module) in enumerate(zip(stages, plain_stages, strict=True)):
        named_parameters, plain_parameters = module.named_parameters(), plain_module.parameters()
        for (name, p), q in zip(named_parameters, plain_parameters, strict=True):
            assert p.grad is not None and q.grad is not None
            error = float((p.grad - q.grad).norm() / q.grad.norm())
            if not error <= (0.0 if needs_equal_bits else 1e-6):  # NaN is also wrong
                cause = ""
                if not program.reduces_in_microbatch_order:
                    cause = ": its backwards are not in the order of the microbatches"
                return f"gradient of {name} in stage {stage} has relative error {error:.1e}{cause}"
    return ""
