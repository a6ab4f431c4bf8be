"""Attach the estimates of time and memory to a plan."""

from __future__ import annotations

from dataclasses import fields

from schedir.ir.cost.cluster import Cluster
from schedir.planner.parallel_plan import NOWHERE, Choice, Host, Memory, Parts, Priced
from schedir.planner.transformer.transformer_spec import Model


def plain(choice: Choice) -> Choice:
    """The choice alone, without what is said of its time and memory."""
    return Choice(**{f.name: getattr(choice, f.name) for f in fields(Choice)})


def priced(
    model: Model,
    cluster: Cluster,
    choice: Choice,
    parts: Parts,
    memory: Memory,
    *,
    exact: bool = False,
    host: Host = NOWHERE,
) -> Priced:
    """A choice with its step, what a GPU does of the model in it, and whether it fits."""
    step = sum(parts)
    flops = model.flops(choice.batch) / step / choice.gpus
    return Priced(
        **vars(plain(choice)), step=step, parts=parts, memory=memory, flops=flops,
        mfu=flops / cluster.roof, exact=exact, host=host,
        fits=memory.total <= cluster.memory and host.total <= (cluster.host_memory or 0.0),
    )  # fmt: skip
