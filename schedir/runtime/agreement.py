"""Agreement: what processes must agree on, and what must go together, before anything runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from torch import nn

from schedir.errors import ModelError
from schedir.ir.program import Program
from schedir.runtime.per_microbatch import Passing
from schedir.runtime.precision import LossScale, Steps
from schedir.runtime.tied import Print
from schedir.transports.transport import Transport


def facts_of(
    program: Program,
    stages: Mapping[int, nn.Module],
    transport: Transport,
    prints: Mapping[int, Sequence[Print]],
) -> dict[str, str]:
    """What a process tells the others of its stages, and of how they are stepped, by name."""
    facts: dict[str, str] = {}
    for s, module in stages.items():
        facts |= _shapes(module, f"stage {s}, slice {transport.tp_rank}")
        if program.summed and (weight := getattr(module, "tied_weight", None)) is not None:
            facts[f"the tied weight, slice {transport.tp_rank}"] = _shape(weight)
    for s, parameters in prints.items():
        for p in parameters:
            who = f"{p.names[0]} in stage {s}, slice {transport.tp_rank}"
            facts[f"the numbers of {who}"] = p.values
            if p.stepped:
                facts[f"the optimizer's options for {who}"] = p.stepped
    return facts


def _shapes(module: nn.Module, where: str) -> dict[str, str]:
    """What a module trains: how much, and what each parameter is, in order."""
    counts: Counter[str] = Counter()
    facts = {}
    trained = ((name, p) for name, p in module.named_parameters() if p.requires_grad)
    for k, (name, p) in enumerate(trained):
        counts[_types(p)] += p.numel()
        facts[f"parameter {k} of {where}"] = f"{name} {_shape(p)}"
    total = " and ".join(f"{n} of {kind}" for kind, n in counts.items()) or "nothing"
    return facts | {f"the parameters of {where}": total}


def _shape(p: nn.Parameter) -> str:
    return f"{list(p.shape)} of {_types(p)}"


def _types(p: nn.Parameter) -> str:
    return f"{p.dtype}, gradients in {p.grad_dtype or p.dtype}"


def require_steps(
    program: Program, optimizer: Steps | None, loss_scale: LossScale | None, *, adds: bool
) -> None:
    """Refuse what could not step a program as it is to be stepped."""
    if loss_scale is not None:
        _require_scalable(program)
    _require_each_once(optimizer, program)
    if adds:
        _require_others_step(program, optimizer)


def _require_scalable(program: Program) -> None:
    """Refuse a program in which a loss scale could not be led."""
    if not program.clip:
        raise ModelError(
            "a loss scale is led by the norm of the gradients, which the program does not take",
            program=program.name,
            hint="compile(..., clip=True); a max_norm of infinity clips nothing",
        )
    if program.plan.updates > 1:
        raise ModelError(
            f"a loss scale changes between updates, and the program has {program.plan.updates} "
            "in a step",
            program=program.name,
        )


def _require_others_step(program: Program, optimizer: Steps | None) -> None:
    """Refuse an executor that adds to gradients, and would do with them what is left to others."""
    does = {
        "sums them over replicas": program.dp > 1,
        "sums them over the holders of a stage": program.plan.rows > 1 and program.trains,
        "has several updates": program.plan.updates > 1,
        "takes their norm": program.clip,
        "steps an optimizer": optimizer is not None,
    }
    if fact := next((what for what, it in does.items() if it), ""):
        raise ModelError(
            f"gradients are added to what is there (adds=True), and the executor {fact}",
            program=program.name,
            hint="adds=False, whose gradients are those of one step",
        )


def _require_each_once(optimizer: Steps | None, program: Program) -> None:
    """Refuse an optimizer that would step one weight twice."""
    seen: set[object] = set()
    for group in getattr(optimizer, "param_groups", ()):
        for p in group["params"]:
            key = (p.data_ptr(), p.shape, p.stride()) if p.numel() and not p.is_meta else id(p)
            if key in seen:
                raise ModelError(
                    f"the optimizer has a weight of {list(p.shape)} twice, and would step it twice",
                    program=program.name,
                    hint="dict.fromkeys(parameters) has each once",
                )
            seen.add(key)


def require_fit(
    program: Program,
    rank: int,
    stages: Mapping[int, nn.Module],
    transport: Transport,
    passing: Passing,
) -> None:
    """Refuse modules and a transport that the program was not made for."""
    own = program.plan.stages_of[rank]

    def refuse(fact: str, hint: str = "") -> None:
        raise ModelError(fact, program=program.name, hint=hint)

    if sorted(stages) != list(own):
        refuse(f"rank {rank} owns stages {list(own)}, but is given {sorted(stages)}")
    if (program.tp, program.dp) != (transport.tp, transport.dp):
        refuse(
            f"the program is for tp {program.tp} and dp {program.dp}, the transport has "
            f"tp {transport.tp} and dp {transport.dp}"
        )
    for s, module in stages.items():
        learns = [name for name, p in module.named_parameters() if p.requires_grad]
        if program.trains and s < program.frozen and learns:
            refuse(
                f"stage {s} is frozen, and {learns[0]} in it requires a gradient: nobody would "
                "train it",
                f"stages[{s}].requires_grad_(False), or compile(..., frozen={s})",
            )
    passing.fit(program)
