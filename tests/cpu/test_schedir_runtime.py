"""Tests of runtime="schedir", which uses our Executor in place of torch's runtime."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss

from schedir.errors import ExecutionError
from schedir.torch_pipelining.schedule import Schedule
from tests.cases import ALL, cases
from tests.cpu.gloo_processes import run
from tests.cpu.tiny_stages import have_same_bits
from tests.cpu.torch_pipelines import WIDTH, Layer, list_rank_stages, make_stage

N = 8 if ALL else 4  # the cases with four ranks need more microbatches
ROWS = 2 * N


class TwoLayers(nn.Module):
    """Two layers, one of which may be skipped, and noise."""

    def __init__(self, noise: float = 0.0) -> None:
        super().__init__()
        self.one, self.two, self.unused = Layer(), Layer(), Layer()
        self.noise = nn.Dropout(noise)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.noise(self.two(self.one(x)))
        return out


def make_modules(stages: int, noise: float = 0.0) -> list[nn.Module]:
    torch.manual_seed(0)
    return [TwoLayers(noise) for _ in range(stages)]


def make_batch(seed: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed + 1)
    return torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)


Runtime = Literal["torch", "schedir"]


def make_schedule(
    modules: list[nn.Module],
    name: str,
    runtime: Runtime = "schedir",
    group: Any = None,
    loss_fn: Any = mse_loss,
    scale_grads: bool = True,
    vee: bool = False,
) -> tuple[Schedule, list[nn.Module]]:
    """Return a schedule of this process's stages, and their modules."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    own_stages = list_rank_stages("ScheduleZBVZeroBubble" if vee else "", rank, ranks, len(modules))
    stages = [make_stage(modules[s], s, len(modules), group) for s in own_stages]
    schedule = Schedule(
        stages, N, loss_fn=loss_fn, scale_grads=scale_grads, schedule=name, runtime=runtime,
        allow_identical_stages=True,
    )  # fmt: skip
    return schedule, [modules[s] for s in own_stages]


def first_stage_args(schedule: Schedule, x: Tensor) -> tuple[Tensor, ...]:
    return (x,) if any(stage.is_first for stage in schedule._stages) else ()


def run_step(schedule: Schedule, seed: int, **options: Any) -> tuple[Any, list[Tensor]]:
    x, y = make_batch(seed)
    losses: list[Tensor] = []
    out = schedule.step(*first_stage_args(schedule, x), target=y, losses=losses, **options)
    return out, losses


def collect_gradients(modules: Iterable[nn.Module]) -> list[Tensor | None]:
    return [p.grad for module in modules for p in module.parameters()]


def run_plain_loop(
    modules: list[nn.Module], seed: int, scale: bool, before: dict[Any, Tensor | None]
) -> tuple[Tensor, list[Tensor]]:
    """Run a plain loop, which divides the step's gradients and adds them to earlier ones."""
    x, y = make_batch(seed)
    outs, losses = [], []
    for p in before:
        p.grad = None
    for mb_x, mb_y in zip(x.chunk(N), y.chunk(N), strict=True):
        out = mb_x
        for module in modules:
            out = module(out)
        loss = mse_loss(out, mb_y)
        loss.backward()
        outs.append(out.detach())
        losses.append(loss.detach())
    for p, old in before.items():
        if p.grad is not None and scale:
            p.grad /= N
        if old is not None and p.grad is not None:
            p.grad = old + p.grad
    return torch.cat(outs), losses


CASES = cases(
    [
        ("one_f_one_b", 1, False),
        ("interleaved", 2, False),
        ("zb_v", 2, True),
        ("dualpipe_v", 2, True),
    ],
    [("zb_h1", 1, False)],
)
UNSCALED = cases(["interleaved"], ["zb_v"])


def compare_runtimes(rank: int) -> dict[str, bool]:
    """Compare three steps in both runtimes and a plain loop. The first two accumulate gradients."""
    is_same = {}
    for name, stages_per_rank, vee in CASES:
        for scale in (True, False) if name in UNSCALED else (True,):
            stages = dist.get_world_size() * stages_per_rank
            schedir_schedule, schedir_modules = make_schedule(
                make_modules(stages), name, scale_grads=scale, vee=vee
            )
            torch_schedule, torch_modules = make_schedule(
                make_modules(stages), name, "torch", scale_grads=scale, vee=vee
            )
            plain = make_modules(stages)
            plain_modules = [plain[stage.stage_index] for stage in schedir_schedule._stages]
            for step, zeroed in enumerate((False, False, True)):
                if zeroed:
                    for module in (*schedir_modules, *torch_modules, *plain):
                        module.zero_grad()
                schedir_result = run_step(schedir_schedule, step)
                torch_result = run_step(torch_schedule, step)
                before = {p: p.grad for m in plain for p in m.parameters()}
                plain_result = run_plain_loop(plain, step, scale, before)
                case = f"{name}, scale_grads {scale}, step {step}: "
                if schedir_result[1]:
                    is_same[case + "outputs"] = have_same_bits(schedir_result, plain_result)
                    is_same[case + "torch's outputs"] = have_same_bits(schedir_result, torch_result)
                is_same[case + "gradients"] = have_same_bits(
                    collect_gradients(schedir_modules), collect_gradients(torch_modules)
                )
                # Sums over several steps have another order than in a plain loop.
                is_same[case + "plain gradients"] = (step > 0 and not scale) or have_same_bits(
                    collect_gradients(schedir_modules), collect_gradients(plain_modules)
                )
    return is_same


@pytest.mark.parametrize("ranks", cases([2], [4]))
def test_schedir_runtime_equals_torch_runtime_and_plain_loop(ranks: int) -> None:
    results = run(compare_runtimes, ranks)
    for rank, checks in enumerate(results):
        assert not [(rank, what) for what, same in checks.items() if not same]
    assert any("outputs" in what for what in (*results[-1], *results[0]))


def compare_changed_options(rank: int) -> dict[str, bool]:
    """Compare both runtimes when options change between steps, on one rank or on all."""
    is_same: dict[str, bool] = {}
    noise = 0.5

    def weighted_loss(y: Tensor, target: Tensor, weight: float = 1.0) -> Tensor:
        return weight * (y - target).square().sum()

    schedules = [
        make_schedule(
            make_modules(4, noise), "interleaved", r, loss_fn=weighted_loss, scale_grads=False
        )
        for r in ("schedir", "torch")
    ]

    def compare(case: str, **options: Any) -> None:
        results = []
        for schedule, modules in schedules:
            torch.manual_seed(5)
            done = run_step(schedule, 0, **options), collect_gradients(modules)
            results.append((done, torch.rand(())))  # also compares the state of the generator
            for module in modules:
                module.zero_grad()
        is_same[case] = have_same_bits(*results)

    compare("noise is drawn as it comes")
    compare("keywords of the loss", loss_kwargs={"weight": 3.0})
    for _, modules in schedules:
        modules[0].get_submodule("one").requires_grad_(rank == 0)
    compare("frozen on one rank")
    for _, modules in schedules:
        modules[0].requires_grad_(True)
    compare("not any more")
    x, y = make_batch(3)
    outs = []
    old_gradients = [torch.ones_like(p) for p in schedules[0][1][0].parameters()]
    for p, grad in zip(schedules[0][1][0].parameters(), old_gradients, strict=True):
        p.grad = grad
    for schedule, modules in schedules:
        for module in modules:
            module.eval()
        losses: list[Tensor] = []
        with torch.no_grad():
            outs.append(
                (schedule.eval(*first_stage_args(schedule, x), target=y, losses=losses), losses)
            )
        for module in modules:
            module.train()
    is_same["eval"] = have_same_bits(*outs)
    with torch.inference_mode():
        schedule, modules = schedules[0]
        short = schedule.eval(*first_stage_args(schedule, x[:N]))
        is_same["eval of fewer rows, with no target"] = short is None or short.shape == (N, WIDTH)
    is_kept = [
        p.grad is grad for p, grad in zip(modules[0].parameters(), old_gradients, strict=True)
    ]
    is_same["an evaluation leaves gradients alone"] = all(is_kept) and bool(old_gradients[0].all())
    modules[0].zero_grad()
    compare("training after an evaluation")
    runtime = schedules[0][0]._executor_runtime
    assert runtime is not None
    is_same["executors are kept"] = len(runtime.executors) == 4

    schedule, modules = schedules[0]
    microbatches: dict[str, Any] = {"arg_mbs": None, "target_mbs": None}
    if rank == 0:
        microbatches["arg_mbs"] = [(rows,) for rows in x.chunk(N)]
    else:
        microbatches["target_mbs"] = [*y.chunk(N)]
    batch_result = run_step(schedule, 3)
    microbatch_losses: list[Tensor] = []
    make_batch(3)  # sets the seed
    is_same["of microbatches"] = have_same_bits(
        batch_result, (schedule.step(**microbatches, losses=microbatch_losses), microbatch_losses)
    )

    if rank == 1:
        schedules[0][0]._stages[0].submod = schedules[0][1][0] = schedules[1][0]._stages[0].submod
    is_same["after a module is replaced"] = have_same_bits(
        run_step(schedule, 3)[1], batch_result[1]
    )
    return is_same


def test_options_may_change_between_steps() -> None:
    for rank, checks in enumerate(run(compare_changed_options, 2)):
        assert len(checks) == 11
        assert not [(rank, what) for what, same in checks.items() if not same]


def compare_changed_modules(rank: int) -> dict[str, bool]:
    """Compare steps with a plain loop when dtypes or Parameters change but input shapes do not."""
    modules, plain = make_modules(2), make_modules(2)
    for module in (*modules, *plain):
        module.add_module("head", nn.Linear(WIDTH, WIDTH))
        module.register_forward_hook(lambda m, _, y: m.head(y))
    plain[0].load_state_dict(modules[0].state_dict())
    plain[1].load_state_dict(modules[1].state_dict())
    schedule, own_modules = make_schedule(modules, "one_f_one_b")
    is_same = {}

    def compare(case: str) -> None:
        for module in (*modules, *plain):
            module.zero_grad()
        run_step(schedule, 0)
        run_plain_loop(plain, 0, True, {p: None for m in plain for p in m.parameters()})
        is_same[case] = have_same_bits(
            collect_gradients(own_modules), collect_gradients(plain[rank : rank + 1])
        )

    compare("as it is")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        compare("under autocast")
    compare("without it")
    for module in (*modules, *plain):
        state = {name: p.clone() + 1 for name, p in module.state_dict().items()}
        module.load_state_dict(state, assign=True)
    compare("of other Parameters")
    for module in (*modules, *plain):
        layer = nn.Linear(WIDTH, WIDTH)
        nn.init.ones_(layer.weight), nn.init.ones_(layer.bias)
        module.get_submodule("one").linear = layer
    compare("of another layer")
    return is_same


def test_step_follows_changed_dtypes_and_parameters() -> None:
    for rank, checks in enumerate(run(compare_changed_modules, 2)):
        assert len(checks) == 5
        assert not [(rank, what) for what, same in checks.items() if not same]


def collect_errors_of_failed_step(rank: int) -> list[str]:
    """Return the errors of a step that fails on one rank, and check that the next step works."""
    schedule, modules = make_schedule(make_modules(2), "one_f_one_b")
    run_step(schedule, 0)
    hook = modules[0].register_forward_hook(lambda *_: 1 / 0) if rank else None
    errors = []
    try:
        run_step(schedule, 0)
    except ExecutionError as error:
        errors.append(error.fact)
    if hook is not None:
        hook.remove()
    for module in modules:
        module.zero_grad()
    run_step(schedule, 1)
    plain = make_modules(2)
    run_plain_loop(plain, 1, True, {p: None for m in plain for p in m.parameters()})
    assert have_same_bits(collect_gradients(modules), collect_gradients(plain[rank : rank + 1]))
    return errors


def test_failed_rank_is_named_without_hang() -> None:
    (first,), (second,) = run(collect_errors_of_failed_step, 2, limit=40)
    assert "has left" in first or "another process was lost" in first
    assert "ZeroDivisionError" in second


def compare_replicated_pipelines(rank: int) -> bool:
    """Return whether replicated pipelines, reduced by DDP or by hand, equal a single process."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    dp, pp = mesh.get_group("dp"), mesh.get_group("pp")
    is_same = []
    for name, wrapped in (("one_f_one_b", True), ("zb_h1", True), ("one_f_one_b", False)):
        modules: list[nn.Module] = [nn.Sequential(Layer(), Layer()) for _ in range(2)]
        torch.manual_seed(0)
        for p in (p for module in modules for p in module.parameters()):
            nn.init.normal_(p)
        plain = [*map(deepcopy, modules)]
        if wrapped:
            modules = [nn.parallel.DistributedDataParallel(m, process_group=dp) for m in modules]
        schedule, own_modules = make_schedule(modules, name, group=pp)
        run_step(schedule, dist.get_rank(dp))
        if not wrapped:
            for p in own_modules[0].parameters():
                assert p.grad is not None
                dist.all_reduce(p.grad, group=dp)
                p.grad /= 2
        for replica in range(2):
            run_plain_loop(plain, replica, True, {p: p.grad for m in plain for p in m.parameters()})
        plain_module = plain[dist.get_rank(pp)]
        for p, q in zip(own_modules[0].parameters(), plain_module.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None
            is_same.append(torch.allclose(p.grad, q.grad / 2, rtol=1e-6, atol=1e-7))
    return all(is_same)


def test_replicated_pipelines_of_device_mesh_equal_one_process() -> None:
    assert all(run(compare_replicated_pipelines, 4))
