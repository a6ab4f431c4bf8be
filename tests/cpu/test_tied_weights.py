"""Tests that stages train tied weights as the unsplit model, in one process and in several."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import schedir
from schedir import PipelineShape
from schedir.runtime import make_backward_splittable
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.executor import Executor
from schedir.runtime.executor_options import GradientOptions
from schedir.runtime.in_process import InProcessExecutor
from schedir.schedules import dualpipe, one_f_one_b, zb_h1, zb_v
from schedir.transports.gloo import GlooTransport
from tests.cases import cases
from tests.cpu.gloo_processes import run
from tests.cpu.tiny_stages import gpt_executor, have_same_bits, make_replica_batch

VOCAB, WIDTH, LENGTH = 11, 6, 5
SCALE = 0.25
adam = partial(torch.optim.AdamW, lr=0.02)
MIDDLE_LAYERS = ((1, 2),)  # layers with the same matrix
THREE_LAYERS = ((0, 1, 3),)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + torch.tanh(self.up(self.norm(x)))
        return y


class Model(nn.Module):
    """A model whose head's weight is the embedding's Parameter, as in Hugging Face's GPT-2."""

    h: Any

    def __init__(self, layers: int, shared: Sequence[Sequence[int]] = (), seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.wte = nn.Embedding(VOCAB, WIDTH)
        self.h = nn.ModuleList(Layer() for _ in range(layers))
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.lm_head.weight = self.wte.weight
        for first, *others in shared:
            for other in others:
                self.h[other].up.weight = self.h[first].up.weight
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.wte(x)
        for layer in self.h:
            x = layer(x)
        y: Tensor = self.lm_head(x)
        return y


class LayerStage(nn.Module):
    """A layer, with the embedding or the head. The names are not those of the model."""

    def __init__(self, model: Model, s: int) -> None:
        super().__init__()
        self.words = model.wte if s == 0 else None
        self.layer = model.h[s]
        self.head = model.lm_head if s == len(model.h) - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.words is None else self.words(x)
        x = self.layer(x)
        return x if self.head is None else self.head(x)


def parts(model: Model) -> list[Any]:
    return [LayerStage(model, s) for s in range(len(model.h))]


def loss(y: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(y.flatten(0, 1), target.flatten(), reduction="sum")


def batch(microbatches: int, step: int) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(100 + step)
    x = torch.randint(0, VOCAB, (microbatches, 2, LENGTH + 1), generator=numbers)
    return x[..., :-1], x[..., 1:]


BOUNDARY = Boundary((2, LENGTH, WIDTH), torch.float64)


def train_plain_loop(model: nn.Module, microbatches: int, clip: float = 0.0) -> None:
    """Train the unsplit model microbatch by microbatch."""
    optimizer = adam(model.parameters())
    for step in range(3):
        model.zero_grad()
        for x, target in zip(*batch(microbatches, step), strict=True):
            torch.autograd.backward(loss(model(x), target) * SCALE)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def is_near(one: nn.Module, other: nn.Module, tolerance: float = 1e-9) -> bool:
    return all(
        torch.allclose(p, q, rtol=0, atol=tolerance)
        for p, q in zip(one.parameters(), other.parameters(), strict=True)
    )


VEE = PipelineShape(2, 4, 2, "vee")


def test_tied_weights_true_finds_shared_parameter() -> None:
    plain_model, model = Model(2), Model(2)
    make_backward_splittable(model)
    program = schedir.compile(zb_v, PipelineShape(1, 3, 2, "vee"), tied_weights=True)
    ranks = InProcessExecutor(
        program, parts(model), loss=loss, boundary=BOUNDARY, optimizer=adam, tied_weights=None
    )
    for step in range(3):
        ranks.step(*batch(3, step), SCALE)
    train_plain_loop(plain_model, 3)
    assert is_near(model, plain_model)


# ---------------------------------------------------------------- processes


def train_process(
    process: int, schedule: Any, shape: PipelineShape, shared: Any, dp: int, copies: str
) -> dict[int, dict[str, Tensor]]:
    """Return the weights of a process after three steps."""
    stages = parts(Model(shape.stages, shared))
    make_backward_splittable(nn.ModuleList(stages))
    ties = schedir.find_tied_weights(stages)
    program = schedir.compile(
        schedule, shape, dp=dp, progress_model="per_edge", tied_weights=ties, clip_grad_norm=True
    )
    transport = GlooTransport(program)
    own_stages = {s: stages[s] for s in shape.stages_on_rank[transport.rank]}
    if copies == "copied":
        own_stages = {s: deepcopy(module) for s, module in own_stages.items()}
    parameters = dict.fromkeys(p for module in own_stages.values() for p in module.parameters())
    executor = Executor(
        program, transport.rank, own_stages, transport, loss=loss, boundary=BOUNDARY,
        optimizer=adam(parameters), tied_weights=ties, gradients=GradientOptions(max_norm=0.5),
    )  # fmt: skip
    m = shape.microbatches
    for step in range(3):
        x, y = batch(m * dp, step)
        local_batch = slice(transport.dp_rank * m, (transport.dp_rank + 1) * m)
        executor.step(x[local_batch], y[local_batch], SCALE)
    return {s: module.state_dict() for s, module in own_stages.items()}


@pytest.mark.parametrize(
    ("schedule", "shape", "shared", "dp", "copies"),
    cases(
        [(zb_h1, PipelineShape(4, 4), THREE_LAYERS, 1, "copied"), (zb_v, VEE, (), 2, "shared")],
        [(dualpipe, PipelineShape(4, 8, placement="mirror"), MIDDLE_LAYERS, 1, "shared")],
    ),
)
def test_tied_weights_on_processes_train_like_plain_loop(
    schedule: Any, shape: PipelineShape, shared: Any, dp: int, copies: str
) -> None:
    results = run(train_process, shape.ranks * dp, schedule, shape, shared, dp, copies)
    plain_model = Model(shape.stages, shared)
    train_plain_loop(plain_model, shape.microbatches * dp, clip=0.5)
    expected = [part.state_dict() for part in parts(plain_model)]
    first_copies: dict[Any, Tensor] = {}
    for states in results:
        for s, weights in states.items():
            for name, p in weights.items():
                assert torch.allclose(p, expected[s][name], rtol=0, atol=1e-9)
                key = expected[s][name].data_ptr()  # the same for all copies
                assert torch.equal(first_copies.setdefault(key, p), p)


def train_sharded_gpt(process: int, ties_from: str) -> dict[int, dict[str, Tensor]]:
    """Return the state of a GPT with a sharded embedding, and ties by name or by attribute."""
    program = schedir.compile(
        one_f_one_b, PipelineShape(2, 3), tp=2, progress_model="per_edge", tied_weights=True,
        clip_grad_norm=True,
    )  # fmt: skip
    transport = GlooTransport(program)
    named = schedir.TiedWeights((((0, "embedding.weight"), (1, "head.weight")),))
    ties = named if ties_from == "declared" else None
    executor = gpt_executor(program, transport, lr=0.01, tied_weights=ties)
    for step in range(2):
        executor.step(*make_replica_batch(program, transport, step))
    return {s: stage.module.state_dict() for s, stage in executor.stages.items()}


def test_sharded_tied_weight_by_name_equals_attribute() -> None:
    by_name, by_attribute = (run(train_sharded_gpt, 4, how) for how in ("declared", "named"))
    assert have_same_bits(by_name, by_attribute)
    for slice_ in (0, 1):
        first, last = by_name[slice_][0]["embedding.weight"], by_name[2 + slice_][1]["head.weight"]
        assert torch.equal(first, last) and first.shape[0] == 16
