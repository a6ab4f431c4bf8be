"""Tests that undeclared ties, and weights that are trained unexpectedly, are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedir
from schedir import PipelineShape, TiedWeights
from schedir.errors import ModelError, SchedirError
from schedir.runtime import make_backward_splittable
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.executor import Executor
from schedir.runtime.executor_options import ExecutionOptions
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.model_checks.parameter_guard import ParameterGuard
from schedir.schedules import gpipe, interleaved, one_f_one_b, zb_v
from schedir.transports.gloo import GlooTransport
from tests.cpu.gloo_processes import RankError, run
from tests.cpu.test_tied_weights import BOUNDARY, SCALE, Model, adam, batch, loss, parts

GOLDEN = Path(__file__).parents[1] / "golden" / "ties.txt"
TEXTS = dict(re.findall(r"^## (.*)\n((?:(?!## ).*\n)*)", GOLDEN.read_text(), flags=re.M))
SHAPE = PipelineShape(2, 2)


def _make_executor(
    stages: Any, tied: Any = False, tied_weights: TiedWeights | None = None, **options: Any
) -> InProcessExecutor:
    program = schedir.compile(gpipe, PipelineShape(len(stages), 2), tied_weights=tied)
    return InProcessExecutor(
        program, stages, loss=loss, boundary=BOUNDARY, tied_weights=tied_weights, **options
    )


def _undeclared_tie(tied: Any = False, **options: Any) -> InProcessExecutor:
    return _make_executor(parts(Model(2)), tied, **options)


def _undeclared_copies(**options: Any) -> InProcessExecutor:
    return _make_executor([deepcopy(s) for s in parts(Model(2))], **options)


def _found_ties(change: Callable[[list[Any]], object], *, copies: bool) -> InProcessExecutor:
    """Declare the ties that stages have before a change of these stages, or of their copies."""
    stages = parts(Model(2))
    ties = schedir.find_tied_weights(stages)
    stages = [deepcopy(s) for s in stages] if copies else stages
    with torch.no_grad():
        change(stages)
    return _make_executor(stages, ties, ties)


def _declared_ties(stages: Any, *places: tuple[int, str]) -> InProcessExecutor:
    ties = TiedWeights((places,))
    return _make_executor(stages, ties, ties)


UP_WEIGHTS = ((0, "layer.up.weight"), (1, "layer.up.weight"))


def _duplicate_in_optimizer() -> InProcessExecutor:
    stages = parts(Model(2))

    def make_optimizer(parameters: Any) -> Any:
        with pytest.warns(UserWarning, match="duplicate"):
            return torch.optim.SGD([*parameters, stages[0].words.weight], lr=0.1)

    return _make_executor(stages, True, optimizer=make_optimizer)


def _hook_on_tied_weight() -> InProcessExecutor:
    stages = parts(Model(2))
    stages[0].words.weight.register_hook(lambda grad: grad)
    return _make_executor(stages, True)


class _TrainedLoss(nn.Module):
    """A loss with a Parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.times = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, y: Tensor, target: Tensor) -> Tensor:
        return loss(y * self.times, target)


def _step_with_trained_loss(is_optimized: bool) -> InProcessExecutor:
    learns = _TrainedLoss()
    program = schedir.compile(gpipe, SHAPE, tied_weights=True)
    loss_weights = [learns.times] if is_optimized else []
    ranks = InProcessExecutor(
        program, parts(Model(2)), loss=learns, boundary=BOUNDARY,
        optimizer=lambda parameters: torch.optim.SGD([*parameters, *loss_weights], lr=0.1),
    )  # fmt: skip
    ranks.step(*batch(2, 0), SCALE)
    return ranks


def _scaled_embedding() -> InProcessExecutor:
    model = Model(2)
    model.wte.max_norm = 1.0
    return _make_executor(parts(model), True)


def _step_after_change(change: Callable[[Any], object]) -> InProcessExecutor:
    """Run a step before and after a change of the second layer. Its bias is frozen."""
    model = Model(2)
    model.h[1].up.bias.requires_grad_(False)
    stages = parts(model)
    ranks = _make_executor(stages, True)
    ranks.step(*batch(2, 0), SCALE)
    change(stages[1].layer)
    ranks.step(*batch(2, 1), SCALE)
    return ranks


MISTAKES: dict[str, Callable[[], object]] = {
    "one Parameter in two stages": _undeclared_tie,
    "other stages are tied": lambda: _make_executor(parts(Model(3)), ((0, 1),)),
    "copies that nobody declares": _undeclared_copies,
    "copies that differ": lambda: _found_ties(lambda s: s[1].head.weight.mul_(2), copies=True),
    "a frozen copy": lambda: _found_ties(
        lambda s: s[0].words.weight.requires_grad_(False), copies=False
    ),
    "two shapes": lambda: _declared_ties(
        [deepcopy(s) for s in parts(Model(2))], (0, "words.weight"), UP_WEIGHTS[1]
    ),
    "three stages declared as two": lambda: _declared_ties(
        parts(Model(3, ((0, 1, 2),))), *UP_WEIGHTS
    ),
    "no such name": lambda: _declared_ties(
        parts(Model(2)), (0, "wte.weight"), (1, "lm_head.weight")
    ),
    "twice in the optimizer": _duplicate_in_optimizer,
    "a hook": _hook_on_tied_weight,
    "nothing to tie": lambda: _make_executor(parts(Model(3)), ((0, 2), (1, 2))),
    "a whole model's ties": lambda: _undeclared_tie(schedir.find_tied_weights(Model(2))),
    "flat stages": lambda: _undeclared_tie((0, 1)),
    "a stage too many": lambda: _undeclared_tie(((0, 4),)),
    "no Ties": lambda: _undeclared_tie(tied_weights=True),
    "a model's Ties": lambda: _undeclared_tie(tied_weights=schedir.find_tied_weights(Model(2))),
    "no names": lambda: TiedWeights(((0, "words.weight"), (1, "head.weight"))),  # type: ignore[arg-type]
    "two Parameters of a stage": lambda: _declared_ties(
        parts(Model(2)), *UP_WEIGHTS, (1, "layer.norm.bias")
    ),
    "a loss that learns": lambda: _step_with_trained_loss(is_optimized=True),
    "an embedding that scales": _scaled_embedding,
    "own stages alone": lambda: schedir.find_tied_weights({1: Model(2)}),
    "other names": lambda: schedir.find_tied_weights(Model(2)).locate_in_stages(
        deepcopy(parts(Model(2)))
    ),
    "trained now": lambda: _step_after_change(lambda layer: layer.up.bias.requires_grad_(True)),
    "frozen now": lambda: _step_after_change(lambda layer: layer.norm.requires_grad_(False)),
    "added": lambda: _step_after_change(lambda layer: setattr(layer, "low", nn.Linear(2, 2))),
    "replaced": lambda: _step_after_change(
        lambda layer: setattr(layer.up, "weight", nn.Parameter(layer.up.weight.detach().clone()))
    ),
    "removed": lambda: _step_after_change(lambda layer: delattr(layer, "norm")),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_refused_with_golden_errors(mistake: str) -> None:
    with pytest.raises(SchedirError) as caught:
        MISTAKES[mistake]()
    assert str(caught.value) == TEXTS[mistake].strip()


def test_golden_errors_and_mistakes_have_same_names() -> None:
    assert TEXTS.keys() == MISTAKES.keys()


def test_untrained_parameters_of_loss_warn() -> None:
    """The loss has an unfrozen Parameter, and the warning appears once."""
    with pytest.warns(UserWarning, match="stage 1 or its loss uses Parameters") as caught:
        _step_with_trained_loss(is_optimized=False).step(*batch(2, 1), SCALE)
    assert len(caught) == 1


def test_tied_weight_locations_are_sorted_and_unique() -> None:
    a, b = (0, "words.weight"), (1, "head.weight")
    assert TiedWeights(((b, a, b),)) == TiedWeights([[[*a], [*b]]])  # type: ignore[arg-type]


def test_allow_identical_stages_accepts_equal_copies() -> None:
    ranks: Any = _undeclared_copies(execution=ExecutionOptions(allow_identical_stages=True))
    ranks.step(*batch(2, 0), SCALE)
    one, other = (rank.stages[s].module for s, rank in enumerate(ranks.executors))
    assert not torch.equal(one.words.weight.grad, other.head.weight.grad)


def test_equal_constant_weights_are_accepted() -> None:
    """Equal norms and zero biases pass, but not a matrix whose sampled elements are constant."""
    stages: list[Any] = [nn.Sequential(nn.LayerNorm(200), nn.Linear(200, 200)) for _ in range(2)]
    for stage in stages:
        nn.init.zeros_(stage[1].weight)
        nn.init.zeros_(stage[1].bias)
    options: Any = {"loss": lambda y, t: y.sum(), "boundary": Boundary((2, 200))}
    program = schedir.compile(gpipe, SHAPE)
    InProcessExecutor(program, stages, **options)
    with torch.no_grad():
        for k, stage in enumerate(stages):
            stage[1].weight[3, 5] = 1.0 + k
    InProcessExecutor(program, stages, **options)
    with torch.no_grad():
        stages[1][1].weight[3, 5] = 1.0
    with pytest.raises(ModelError, match=r"1.weight of stage 0 and 1.weight of stage 1 are equal"):
        InProcessExecutor(program, stages, **options)


def test_untrained_module_changes_are_accepted() -> None:
    model = Model(2)
    model.h[0].up.requires_grad_(False)
    stages = parts(model)
    ranks = _make_executor(stages, True)
    changes: Any = (
        lambda: setattr(stages[0].layer, "note", nn.Identity()),
        lambda: setattr(stages[0].layer, "more", nn.Linear(1, 1).requires_grad_(False)),
        lambda: setattr(stages[0].layer.up, "weight", nn.Parameter(
            stages[0].layer.up.weight.detach().clone(), requires_grad=False)),
    )  # fmt: skip
    for change in changes:
        change()
        ranks.step(*batch(2, 0), SCALE)


def test_parameter_guard_does_not_traverse_modules() -> None:
    """The check does not walk through the modules, which would take as long as a step."""
    stages: Any = dict(enumerate(parts(Model(2))))
    guard = ParameterGuard(stages)
    for stage in stages.values():
        stage.named_parameters = stage.modules = None
    guard.require_unchanged()


def test_reassigned_weight_data_is_trained() -> None:
    """Between steps, vector_to_parameters moves the weights to other memory."""
    plain_model, model = Model(4), Model(4)
    stages = parts(model)
    make_backward_splittable(model)
    program = schedir.compile(
        zb_v, PipelineShape(2, 4, 2, "vee"), tied_weights=schedir.find_tied_weights(stages)
    )
    ranks = InProcessExecutor(program, stages, loss=loss, boundary=BOUNDARY)
    for step in range(2):
        vector = nn.utils.parameters_to_vector(plain_model.parameters()) * 0.9
        for either in (plain_model, model):
            nn.utils.vector_to_parameters(vector.detach().clone(), either.parameters())
        ranks.step(*batch(4, step), SCALE)
        plain_model.zero_grad()
        for x, target in zip(*batch(4, step), strict=True):
            torch.autograd.backward(loss(plain_model(x), target) * SCALE)
        for p, expected in zip(model.parameters(), plain_model.parameters(), strict=True):
            assert torch.allclose(p.grad, expected.grad, rtol=1e-9)  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_failed_step_keeps_shared_parameter(error: type[BaseException]) -> None:
    def raise_error(y: Tensor, target: Tensor) -> Tensor:
        raise error

    model = Model(2)
    stages = parts(model)
    program = schedir.compile(interleaved, PipelineShape(1, 2, 2), tied_weights=True)
    ranks = InProcessExecutor(program, stages, loss=raise_error, boundary=BOUNDARY)
    for step in (ranks.step, ranks.executors[0].step):
        ranks.executors[0].resources.is_in_step = False
        with pytest.raises((SchedirError, error)):
            step(*batch(2, 0), SCALE)
        assert stages[0].words.weight is stages[1].head.weight is model.wte.weight


# ---------------------------------------------------------------- processes


def _run_process(process: int, difference: str) -> None:
    """Build the executor of one process, which has only its own stage."""
    dp = 2 if difference.startswith("replicas") else 1
    program = schedir.compile(one_f_one_b, SHAPE if dp == 1 else PipelineShape(1, 2), dp=dp)
    transport = GlooTransport(program)
    model = Model(program.shape.stages, seed=process if difference == "replicas" else 0)
    if difference == "seeded":
        model = Model(2)
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() + 1)
        model.h[1].up.weight = nn.Parameter(model.h[0].up.weight.detach().clone())
    ties = (
        schedir.find_tied_weights(parts(model)) if difference in ("decay", "not stepped") else None
    )
    if ties:
        program = schedir.compile(one_f_one_b, SHAPE, tied_weights=ties)
    stage = deepcopy(parts(model)[transport.rank])
    decay = 0.1 if difference.endswith("decay") and process else 0.01
    weights = [*stage.parameters()][: -1 if difference == "not stepped" and process else None]
    Executor(
        program, transport.rank, {transport.rank: stage}, transport, loss=loss, tied_weights=ties,
        boundary=BOUNDARY, optimizer=adam(weights, weight_decay=decay),
        execution=ExecutionOptions(allow_identical_stages=difference == "alike"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("difference", "message"),
    [
        ("tied", "words.weight of stage 0 and head.weight of stage 1 are equal, but they are not"),
        ("seeded",
         "layer.up.weight of stage 0 and layer.up.weight of stage 1 are equal, but they are not"),
        ("replicas", "processes 0 and 1 do not agree on the values of "),
        ("replicas' decay",
         "the optimizer's options for layer.norm.bias in stage 0, slice 0: AdamW with"),
        ("decay", "differ: AdamW with lr 0.02, betas (0.9, 0.999), eps 1e-08, weight_decay 0.01"),
        ("not stepped", "and head.weight of stage 1 are one weight, but their optimizer options "),
    ],
)  # fmt: skip
def test_differences_between_processes_are_refused(difference: str, message: str) -> None:
    with pytest.raises(RankError) as caught:
        run(_run_process, 2, difference, limit=60)
    assert len(caught.value.tracebacks) == 2
    assert all("ModelError: " in tb and message in tb for tb in caught.value.tracebacks.values())


def test_allow_identical_stages_applies_to_processes() -> None:
    assert run(_run_process, 2, "alike") == [None, None]
