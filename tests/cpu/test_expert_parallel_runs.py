"""Tests of expert parallelism over Gloo: equal gradients, and too many tokens for a buffer."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.expert_parallel import combined_1f1b
from schedir import Program, compile
from schedir.checkpoints import load, save
from schedir.errors import SchedirError
from schedir.models.moe_gpt import (
    Expert,
    MoEConfig,
    MoELayer,
    MoEStage,
    build_boundaries,
    build_stage,
    split_stage,
)
from schedir.models.routing_bias import make_adamw_groups, make_load_term, make_routing_bias
from schedir.runtime import (
    Boundary,
    Executor,
    GlooTransport,
    GradientOptions,
    InProcessExecutor,
    run_sequential,
)
from schedir.runtime.boundaries.size_measurement import measure_model_states
from schedir.runtime.parameters.buckets import ShardSpec, is_expert
from schedir.training.config.train_config import TrainConfig
from schedir.training.optimizer import build_optimizer
from tests.cases import cases
from tests.cpu.checkpoint_layouts import keep_name
from tests.cpu.gloo_processes import run
from tests.cpu.tiny_stages import moe_executor

CONFIG = MoEConfig(
    vocab=23, layers=4, hidden=16, heads=2, context=5, tied=False, experts=8, expert_hidden=12,
    aux_loss=0.5, balance_rate=0.01, shared_experts=2,
)  # fmt: skip
GOLDEN = Path(__file__).parents[1] / "golden" / "experts.txt"
RANKS, MICROBATCHES, SAMPLES, EP, LR = 2, 4, 2, 2, 0.01
SHARED: dict[str, Any] = {"recompute": "half", "buffer_sharing": "minimal", "overlap": True}
SHARED["zero"] = 1
# Schedules, with the stages per rank and options.
SCHEDULES: dict[str, tuple[str | Callable[..., Any], int, dict[str, Any]]] = {
    "dualpipe_v": ("dualpipe_v", 2, {}),
    "combined_1f1b": (combined_1f1b, 1, {}),
    "recomputed": ("eager_1f1b", 1, SHARED),
}
for name, stages in cases([], [("one_f_one_b", 1), ("interleaved", 2), ("zb_h1", 1)]):
    SCHEDULES[name] = name, stages, {}


def draw_batch(replica: int) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of a replica's microbatches."""
    generator = torch.Generator().manual_seed(replica)
    shape = (MICROBATCHES, SAMPLES, CONFIG.context + 1)
    tokens = torch.randint(CONFIG.vocab, shape, generator=generator)
    return tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous()


def get_layers(stage: MoEStage, *names: str) -> list[MoELayer]:
    layers = (layer for name, layer in stage.layers.items() if name in names)
    return [layer for layer in layers if isinstance(layer, MoELayer)]


def skew_routing(stage: MoEStage) -> MoEStage:
    """Let layer 1 send all tokens to the first half of its experts, which are on one rank."""
    with torch.no_grad():
        for layer in get_layers(stage, "1"):
            layer.mlp_norm.bias.add_(1)
            layer.router.weight[: CONFIG.experts // 2].add_(1)
            layer.router.weight[CONFIG.experts // 2 :].sub_(1)
    return stage


def loss(output: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    """Return the loss in float64. That of the model is in float32."""
    logits, aux = output
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") + aux.sum()


def make_single_process(replicas: int, folder: Path) -> tuple[InProcessExecutor, MoEStage]:
    """Make a model, and an executor that has run a step with the microbatches of all replicas."""
    stage = skew_routing(build_stage(CONFIG, 0, 1, dtype=torch.float64))
    program = compile("gpipe", ranks=1, microbatches=replicas * MICROBATCHES)
    alone = InProcessExecutor(
        program, [stage], loss=loss, boundary=(1,),
        optimizer=make_adamw,
    )  # fmt: skip
    step_alone(alone, replicas)
    save(alone, folder, step=1, name_map=keep_name)
    return alone, stage


def make_adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    others, groups = make_adamw_groups(parameters, parameters)
    return torch.optim.AdamW([{"params": others}, *groups], LR)


def step_alone(alone: InProcessExecutor, replicas: int) -> float:
    batches = map(draw_batch, range(replicas))
    inputs, targets = map(torch.cat, zip(*batches, strict=True))
    return float(alone.step(inputs, targets, 1 / 32))


def train_alone(replicas: int) -> tuple[dict[str, Tensor], list[Tensor], list[tuple[str, int]]]:
    """Return gradients, the losses of the replicas, and the calls of experts in one process.

    A call is the name of the expert and the number of its tokens.
    """
    model = skew_routing(build_stage(CONFIG, 0, 1, dtype=torch.float64))
    calls: list[tuple[str, int]] = []
    for name, module in model.named_modules():
        if isinstance(module, Expert) and ".experts." in name:
            module.register_forward_hook(
                lambda _, inputs, output, name=name: calls.append((name, len(inputs[0])))
            )
    losses = []
    for replica in range(replicas):
        total = torch.zeros(())
        for tokens, targets in zip(*draw_batch(replica), strict=True):
            microbatch_loss = loss(model(tokens), targets)
            (microbatch_loss / 32).backward()
            total = total + microbatch_loss.detach()
        losses.append(total)
    parameters = dict(model.named_parameters()).items()
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in parameters}
    return gradients, losses, calls


def train_in_processes(rank: int, replicas: int, folder: str) -> dict[str, Any]:
    """Return gradients, loss and gradient norm of this process, by schedule."""
    results: dict[str, Any] = {}
    for name, (schedule, stages_per_rank, options) in SCHEDULES.items():
        stages = RANKS * stages_per_rank
        program = compile(
            schedule, ranks=RANKS, microbatches=MICROBATCHES, dp=replicas, ep=EP,
            stage_segments="dc" * (CONFIG.layers // stages), progress_model="per_edge",
            blocking_hosts=True, clip_grad_norm=True, **options,
        )  # fmt: skip
        transport = GlooTransport(program)
        make = partial(
            moe_executor, program, transport, CONFIG, SAMPLES, dtype=torch.float64,
            prepare=skew_routing, loss=loss, gradients=GradientOptions(max_norm=torch.inf),
        )  # fmt: skip
        executor, batch = make(), draw_batch(transport.dp_rank)
        total = executor.step(*batch, 1 / 32)
        results[name] = [*iterate_gradients(executor)], total, executor.grad_norm
        if program.zero:
            results["resumed"] = resume(partial(make, make_optimizer=make_adamw), folder, batch)
        transport.shut_down()
    return results


def iterate_gradients(executor: Executor) -> Iterator[tuple[str, int, Tensor]]:
    """Yield the name, the first element and the elements of each gradient of this process."""
    for stage in executor.stages.values():
        for bucket in stage.gradients.buckets:
            for p, (low, *_) in zip(bucket.parameters, bucket.list_shard_ranges(), strict=True):
                if p.grad is not None:  # the shard contains elements of it
                    is_shard = executor.program.zero
                    yield stage.gradients.names[p], low if is_shard else 0, p.grad.flatten()


def resume(make: Callable[[], Executor], folder: str, batch: tuple[Tensor, Tensor]) -> Any:
    """Return the losses of the steps after the step that a single process has saved."""
    losses, before, resumed = [], make(), make()
    load(before, folder, step=1, name_map=keep_name)
    losses.append(before.step(*batch, 1 / 32))
    save(before, f"{folder}/ranks", step=2, name_map=keep_name)
    load(resumed, f"{folder}/ranks", step=2, name_map=keep_name)
    losses += [executor.step(*batch, 1 / 32) for executor in (before, resumed)]
    for stage, other in zip(before.stages.values(), resumed.stages.values(), strict=True):
        for p, q in zip(stage.module.parameters(), other.module.parameters(), strict=True):
            assert torch.equal(p, q)
    return losses


@pytest.mark.parametrize("replicas", cases([2], [4]))
def test_expert_parallel_gradients_equal_one_process(replicas: int, tmp_path: Path) -> None:
    expected, losses, calls = train_alone(replicas)
    assert 0 < len(calls) < replicas * MICROBATCHES * CONFIG.layers * CONFIG.experts
    assert max(float(gradient.abs().max()) for gradient in expected.values()) > 0.1
    norm = torch.stack([gradient.square().sum() for gradient in expected.values()]).sum().sqrt()
    alone, stage = make_single_process(replicas, tmp_path)
    loads = Counter[str]()
    for name, tokens in calls:
        loads[name] += tokens
    for number, layer in stage.layers.items():
        layer_loads = [loads[f"layers.{number}.experts.{e}"] for e in range(CONFIG.experts)]
        mean = sum(layer_loads) / CONFIG.experts
        signs = [(n < mean) - (n > mean) for n in layer_loads]
        assert isinstance(layer, MoELayer) and layer.routing_bias is not None
        steps = [CONFIG.balance_rate * sign for sign in signs]
        assert layer.routing_bias.tolist() == pytest.approx(steps, rel=1e-6)
    ranks = run(train_in_processes, RANKS * replicas, replicas, str(tmp_path))
    for name, (_, _, options) in SCHEDULES.items():
        counts = Counter[str]()
        for process, result in enumerate(ranks):
            gradients, total, own_norm = result[name]
            for parameter, low, gradient in gradients:
                full = expected[parameter].flatten()[low : low + gradient.numel()]
                assert (gradient - full).abs().max() < 1e-12, (name, parameter)
                counts[parameter] += gradient.numel()
            if total is not None:
                assert total.item() == pytest.approx(losses[process // RANKS].item(), rel=1e-12)
            assert own_norm.item() == pytest.approx(norm.item(), rel=1e-12)
        for parameter, full in expected.items():
            copies = replicas // EP if ".experts." in parameter else replicas
            assert counts[parameter] == full.numel() * (1 if "zero" in options else copies)

    second, third, resumed = (
        sum(float(losses[step]) for result in ranks if (losses := result["resumed"])[0] is not None)
        for step in range(3)
    )
    assert second == pytest.approx(step_alone(alone, replicas), rel=1e-12) and third == resumed
    step_alone(alone, replicas)
    load(alone, tmp_path / "ranks", step=2, name_map=keep_name)
    assert third == pytest.approx(step_alone(alone, replicas), rel=1e-12)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_routing_bias_steps_by_sign_of_load(precision: str) -> None:
    placement: Any = {"device": "cpu", "dtype": getattr(torch, precision)}
    bias, weight = make_routing_bias(3, 0.5, placement), nn.Parameter(torch.ones(2, 2, **placement))
    (make_load_term(bias, torch.tensor([5, 1, 0])) / 1e6).backward()  # a million tokens
    build_optimizer([weight, bias], TrainConfig(precision=precision)).step()
    assert bias.tolist() == pytest.approx([-0.5, 0.5, 0.5], rel=1e-3) and weight.sum() == 4


def test_optimizer_state_of_experts_has_fewer_shards() -> None:
    stage = build_stage(CONFIG, 0, 1, ep=2)
    states = measure_model_states(stage, 8.0, ShardSpec(4, 0, 1), range(4))
    experts = sum(p.numel() for p in stage.parameters() if is_expert(p))
    others = sum(p.numel() for p in stage.parameters()) - experts
    assert states.optimizer / 4 == pytest.approx(8 * (experts / 2 + others / 4), rel=0.01)


def test_layer_adds_gated_outputs_of_its_experts() -> None:
    stage = build_stage(CONFIG, 0, 1, dtype=torch.float64)
    assert CONFIG.num_parameters == sum(p.numel() for p in stage.parameters())
    (layer,) = get_layers(stage, "0")
    torch.manual_seed(0)
    x = torch.randn(2, 3, CONFIG.hidden, dtype=torch.float64, requires_grad=True)
    aux = torch.ones(1, dtype=torch.float64, requires_grad=True)
    rows, counts, gates, order, stream, total = layer.route(x, aux)
    output = layer.combine(layer.run_experts(rows, counts), gates, order, stream)

    stream, normed = layer.run_attention(x)
    expected = stream + layer.shared_experts(normed)
    chosen_counts = torch.zeros(CONFIG.experts, dtype=torch.float64)
    probabilities = (normed @ layer.router.weight.T).softmax(-1)
    for position in [(b, t) for b in range(2) for t in range(3)]:
        best = probabilities[position].argsort(descending=True)[: CONFIG.active]
        for e in best.tolist():
            gate = probabilities[position][e] / probabilities[position][best].sum()
            expert_output = layer.experts[str(e)](normed[position].unsqueeze(0)).squeeze(0)
            expected[position] = expected[position] + gate * expert_output
            chosen_counts[e] += 1
    share, mean = chosen_counts / chosen_counts.sum(), probabilities.flatten(0, 1).mean(0)
    balance = aux + CONFIG.aux_loss * 6 * CONFIG.experts * (share * mean).sum()
    assert counts.tolist() == chosen_counts.tolist() and 0 in counts
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(total, balance, rtol=1e-12, atol=0)
    gradients, expected_gradients = (
        torch.autograd.grad(result.square().sum() + loss.sum(), [x, aux, layer.router.weight])
        for result, loss in ((output, total), (expected, balance))
    )
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-10, atol=1e-10)
    layer.eval()
    assert layer.route(x, aux)[-1] is aux


def drop_expert_rank(stage: int, name: str) -> str:
    """Return the same names for the experts of both ranks."""
    return re.sub(r"experts\.(\d)", lambda match: f"experts.{int(match[1]) % 4}", name)


def add_buffers(stage: MoEStage) -> None:
    for layer in get_layers(stage, "0"):
        for expert in layer.experts.values():
            expert.register_buffer("sums", torch.zeros(1))


def read_errors(rank: int) -> dict[str, str]:
    """Return the errors of a step with too many tokens, and of wrong arguments."""
    config = replace(CONFIG, layers=2, capacity_factor=1.25, shared_experts=0)
    options: dict[str, Any] = {"dp": EP, "ep": EP, "stage_segments": "dcdc"}
    options |= {"progress_model": "per_edge", "blocking_hosts": True}
    program = compile("one_f_one_b", ranks=1, microbatches=MICROBATCHES, **options)
    transport = GlooTransport(program)
    stage = build_stage(config, 0, 1, ep=EP, ep_rank=rank)
    stream = Boundary((SAMPLES, CONFIG.context, CONFIG.hidden))
    boundaries: dict[int, Any] = build_boundaries(config, [5], stream, EP)

    def make(program: Program, boundary: Any, **changes: Any) -> Executor:
        changes = {"prepare": skew_routing, "boundary": boundary, "cfg": config} | changes
        return moe_executor(program, transport, samples=SAMPLES, **changes)

    executor = make(program, boundaries)
    sharded = compile("one_f_one_b", ranks=1, microbatches=MICROBATCHES, zero=2, **options)
    unsplit = compile("one_f_one_b", ranks=1, microbatches=MICROBATCHES, dp=EP, ep=EP)
    sent, _, *other_boundaries = boundaries[0]
    float_counts, few_counts = (
        boundaries | {0: (sent, counts, *other_boundaries)}
        for counts in (Boundary((CONFIG.experts,)), Boundary((3,), torch.int64))
    )
    wider = replace(config, expert_hidden=12 + 4 * rank)
    attempts: dict[str, Callable[[], object]] = {
        "equal names": lambda: save(executor, "unused", step=0, name_map=drop_expert_rank),
        "buffers": lambda: save(make(program, boundaries, prepare=add_buffers), "unused", step=0),
        # 2 samples of 5 tokens from 2 replicas, with 2 experts each.
        "too many tokens": lambda: executor.step(*draw_batch(rank)),
        "other shapes": lambda: make(program, boundaries, cfg=wider),
        "sharded gradients": lambda: make(sharded, boundaries),
        "floating-point counts": lambda: make(program, float_counts),
        "too few counts": lambda: make(program, few_counts),
        "a whole stage": lambda: stage(draw_batch(rank)[0][0]),
        "all experts": lambda: make(program, boundaries, experts=(0, 1)),
        "exchanged experts": lambda: make(program, boundaries, experts=(1 - rank, 2)),
        "no segments": lambda: Executor(unsplit, 0, [stage], transport, loss=loss, boundary=stream),
        "one rank": lambda: run_sequential(split_stage(stage), *draw_batch(rank), loss=loss),
    }
    errors: dict[str, str] = {}
    for name, attempt in attempts.items():
        with pytest.raises(SchedirError) as caught:
            attempt()
        errors[name] = str(caught.value)
    return errors


def test_too_many_tokens_and_wrong_experts_are_refused() -> None:
    """The golden file has an error of each rank if they differ."""
    first, second = run(read_errors, EP)
    errors = {name: dict.fromkeys((first[name], second[name])) for name in first}
    assert "\n".join("\n".join([name, *errors[name], ""]) for name in errors) == GOLDEN.read_text()
