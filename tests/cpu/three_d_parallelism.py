"""A GPT of two layers on p x t x d processes, compared with one process in plain torch.

Each case is two steps of SGD with momentum, and three with ALL_CASES=1. A case is right if three
conditions hold. Losses, norms, the gradients of the first step and the weights after the last step
differ from those of one process by at most 1e-6, relative to their norm. All processes that hold a
weight have the same bits of it. These bits are those of plain data parallelism under 1F1B on a mesh
of the same shape, whatever the level of ZeRO, the schedule, recomputation and offload.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

import schedir
from schedir import PipelineShape, Program
from schedir.models import gpt
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.executor import Executor
from schedir.runtime.executor_options import GradientOptions
from schedir.transports.gloo import GlooTransport
from tests.cases import ALL

NEAR, MAX_NORM = 1e-6, 0.05  # for gradients whose norm is about 1
WORLD, MICROBATCHES, BATCH, CONTEXT, VOCAB = 8, 2, 2, 8, 29  # 29: padded
STEPS = 3 if ALL else 2  # the second step uses momentum
MODEL = partial(gpt.GPTConfig, vocab=VOCAB, layers=2, hidden=16, heads=4, context=CONTEXT)
ProcessResults = dict[str, Tensor]  # by name
MergedResults = Mapping[str, Tensor]


class Case(NamedTuple):
    """A run: its pipeline ranks, tensor-parallel ranks and replicas, and its options."""

    p: int
    t: int
    d: int
    zero: int = 0
    tied: bool = False
    clip: bool = False
    sequence: bool = False
    schedule: str = "one_f_one_b"
    options: tuple[tuple[str, str], ...] = ()

    @property
    def program(self) -> Program:
        """The program of the case, with a stage per layer, or one stage of both on one rank."""
        shape, options = PipelineShape(self.p, MICROBATCHES), dict[str, Any](self.options)
        return schedir.compile(
            getattr(schedir.schedules, self.schedule), shape, tp=self.t, dp=self.d,
            tied_weights=self.tied and self.p > 1, clip_grad_norm=self.clip, zero=self.zero,
            sequence_parallel=self.sequence, blocking_hosts=True, **options,
        )  # fmt: skip


def list_cases() -> list[Case]:
    """Return all cases, of which those come first that others are compared with."""
    both = (False, True)
    shapes = ((2, 2, 2), (2, 4, 1), (1, 4, 2), (1, 2, 4), (2, 1, 4))
    found = [
        Case(p, t, d, zero, tied, clip, sequence)
        for p, t, d in shapes
        for sequence, tied, clip, zero in product(both[: 1 + (t > 1)], both, both, range(4))
        if (p, t, d) == shapes[0] or tied == clip
    ]
    for sequence in both:
        every = Case(2, 2, 2, 0, True, True, sequence)
        found += [
            every._replace(zero=3, schedule="zb_h1"),
            every._replace(schedule="gpipe"),
            every._replace(options=(("recompute", "all"),)),
            every._replace(zero=2, options=(("reduce_scatter_at", "each_backward"),)),
            every._replace(options=(("offload", "all"),)),
            every._replace(zero=1, options=(("optimizer_placement", "host"),)),
        ]
    return found


# ---------------------------------------------------------------- several processes


def make_data(step: int, replicas: int) -> tuple[Tensor, Tensor]:
    """Return the tokens of a step and their targets.

    Each has the shape (microbatches of all replicas, batch, context).
    """
    numbers = torch.Generator().manual_seed(1 + step)
    shape = (2, replicas * MICROBATCHES, BATCH, CONTEXT)
    x, y = torch.randint(0, VOCAB, shape, generator=numbers)
    y[:, 0, :3] = gpt.IGNORE_INDEX
    return x, y


def make_sgd(parameters: Any) -> torch.optim.Optimizer:
    """Return an SGD optimizer, since Adam would turn gradients of nearly 0 into signs."""
    return torch.optim.SGD(parameters, 0.3, momentum=0.9)


def run_cases(rank: int, wanted: Sequence[Case]) -> dict[Case, ProcessResults]:
    """Return a process's results per case: losses, norms, its parts of weights and gradients."""
    torch.set_num_threads(1)
    found: dict[Case, ProcessResults] = {}
    for shape in dict.fromkeys(case[:3] for case in wanted):
        programs = {case: case.program for case in wanted if case[:3] == shape}
        first, *more = programs.values()
        transport = GlooTransport(first, extra_programs=more)
        for case, program in programs.items():
            found[case] = _trained(case, program, transport)
        transport.shut_down()
    return found


def _trained(case: Case, program: Program, transport: Any) -> ProcessResults:
    tp, rank, replica = transport.tp_group, transport.rank, transport.dp_rank
    config = MODEL(tied=case.tied)
    stages = {
        s: gpt.build_stage(config, s, program.shape.stages, tp=tp, sequence_parallel=case.sequence)
        for s in program.shape.stages_on_rank[rank]
    }
    tokens = CONTEXT // (case.t if case.sequence else 1)
    executor = Executor(
        program, rank, stages, transport, loss=partial(gpt.loss, tp=tp),
        boundary=Boundary((BATCH, tokens, config.hidden)),
        optimizer=make_sgd([p for stage in stages.values() for p in stage.parameters()]),
        gradients=GradientOptions(max_norm=MAX_NORM if case.clip else None),
    )  # fmt: skip
    results: ProcessResults = {}
    own = slice(replica * MICROBATCHES, (replica + 1) * MICROBATCHES)
    for step in range(STEPS):
        x, y = make_data(step, case.d)
        loss = executor.step(x[own], y[own], 1 / gpt.count_tokens(y))
        if loss is not None:
            results[f"loss {step}.{replica}"] = loss.clone()
        if case.clip:
            results[f"norm {step}"] = executor.grad_norm.clone()
        if not (case.zero or step):  # after the first step the weights differ
            named = _named(stages, transport)
            results |= {f"gradient {name}": get_gradient(p).clone() for name, p in named}
    with executor.full_parameters():
        results |= {f"weight {name}": p.detach().clone() for name, p in _named(stages, transport)}
    return results


def _named(stages: Mapping[int, Any], transport: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of some stages, and their names.

    The name of a tensor-parallel slice also contains the dimension and the number of the slice.
    """
    for stage in stages.values():
        for name, p in stage.named_parameters():
            cut = getattr(p, "shard_dim", None)
            yield name if cut is None else f"{name} {cut} {transport.tp_rank}", p


def get_gradient(p: Tensor) -> Tensor:
    """Return the gradient, which must exist."""
    assert p.grad is not None
    return p.grad


def merge_results(
    results_by_process: Sequence[ProcessResults], case: Case
) -> tuple[dict[str, Tensor], list[str]]:
    """Merge the results of all processes, and return names whose bits differ between processes."""
    each: dict[str, Tensor] = {}
    differ: list[str] = []
    for own in results_by_process:
        for name, value in own.items():
            if not torch.equal(each.setdefault(name, value), value):
                differ.append(name)
    whole: dict[str, Tensor] = {}
    slices: dict[str, dict[int, Tensor]] = {}
    for name, value in each.items():
        match name.split():
            case [_, _, _, k]:
                slices.setdefault(name.removesuffix(f" {k}"), {})[int(k)] = value
            case _:
                whole[name] = value
    for name, parts in slices.items():
        cut = int(name.rsplit(" ", 1)[1])
        value = torch.cat([parts[k] for k in range(case.t)], cut)
        rows = VOCAB if ".weight" in name and name.split()[1][:4] in ("embe", "head") else None
        whole[name.rsplit(" ", 1)[0]] = value[:rows]
    for step in range(STEPS):
        losses = [whole.pop(f"loss {step}.{replica}") for replica in range(case.d)]
        whole[f"loss {step}"] = torch.stack(losses).double().sum()
    return whole, differ


# ---------------------------------------------------------------- comparison with one process


def run_plain_torch(case: Case) -> MergedResults:
    """Return the results that `merged` has, from a loop of plain torch in one process."""
    model = gpt.build_stage(MODEL(tied=case.tied), 0, 1)
    parameters = dict(model.named_parameters())
    optimizer, found = make_sgd(parameters.values()), {}
    for step in range(STEPS):
        x, y = make_data(step, case.d)
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for tokens, targets in zip(x, y, strict=True):
            loss = gpt.loss(model(tokens), targets)
            torch.autograd.backward(loss / gpt.count_tokens(y))
            total += loss.detach()
        found[f"loss {step}"] = total
        if case.clip:
            found[f"norm {step}"] = torch.nn.utils.clip_grad_norm_(parameters.values(), MAX_NORM)
        if not step:
            found |= {f"gradient {name}": get_gradient(p).clone() for name, p in parameters.items()}
        optimizer.step()
    return found | {f"weight {name}": p.detach() for name, p in parameters.items()}


def _of_head(name: str, want: MergedResults) -> str:
    """Return the name of a weight in the model of one stage, where a tied weight has one name."""
    return name if name in want else name.replace("head.weight", "embedding.weight")


def find_equal_case(case: Case) -> Case | None:
    """Return a case with the same order of sums: plain data parallelism, 1F1B, no offload."""
    other = case._replace(zero=0, schedule="one_f_one_b", options=())
    return None if other == case else other


def find_faults(
    results_by_process: Sequence[Mapping[Case, ProcessResults]],
) -> dict[Case, list[str]]:
    """Return the differences of each case that the processes ran.

    A case is compared between processes, with one process, and with the case of the same order of
    sums.
    """
    known: dict[tuple[Any, ...], MergedResults] = {}
    whole: dict[Case, dict[str, Tensor]] = {}
    faults: dict[Case, list[str]] = {}
    for case in results_by_process[0]:
        whole[case], differ = merge_results([own[case] for own in results_by_process], case)
        assert {"loss", "weight"} <= {name.split()[0] for name in whole[case]}
        faults[case] = [f"{name} differs between processes" for name in differ]
        key = (case.d, case.tied, case.clip)
        if key not in known:
            known[key] = run_plain_torch(case)
        twin = whole.get(find_equal_case(case) or case, {})
        for name, value in whole[case].items():
            want = known[key][_of_head(name, known[key])].double()
            distance = float((value.double() - want).norm() / want.norm().clamp(min=1e-30))
            if not distance <= NEAR:
                faults[case].append(f"{name} has the distance {distance} from one process")
            if name in twin and not torch.equal(value, twin[name]):
                faults[case].append(f"{name} has other bits than with the same order of sums")
    return faults
