"""Cluster: what its machines do in a second, and what that makes messages, sums and copies cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from math import ceil, inf, log2

import numpy as np
from numpy.typing import NDArray

from schedir.errors import CostsError, UsageError, expect, said
from schedir.ir.costs import Cost, Costs
from schedir.ir.mesh import mesh_of
from schedir.ir.per_stage import from_grid, grid
from schedir.ir.plan import Plan
from schedir.ir.sizes import Sizes
from schedir.ir.units import number_of

Floats = NDArray[np.float64]
Processes = NDArray[np.int64]
Group = int | Sequence[int] | Processes  # a number is that of the first ones
Groups = Callable[[Processes], Processes]  # by the holders of a stage, a row for each group


@dataclass(frozen=True)
class Cluster:
    """Machines that are alike: how many, and what each of their GPUs does in a second.

    `nodes` have `gpus_per_node` each.  Of one GPU are `flops`, floating-point operations per second
    in the type that trains, and `memory`, in bytes.  In bytes per second are `hbm`, its own memory;
    `nvlink`, what it sends to GPUs of its node while as much comes in; `network`, the same to other
    nodes, a GPU's share of its node's; `host` and `disk`, to and from its host's memory, and a
    disk, where they are told.  `latency` is what a message takes beside its bytes, in seconds, and
    `kernel_us` what a kernel takes to be issued, in microseconds.  Say what is reached, not what a
    data sheet has: nothing is taken off.  Texts have units: "80GB", "300GB/s", "312TFLOP/s", "5us".

    Processes are numbered as they are placed: those of one node side by side, then the next node's.
    A group of them within a node talks over nvlink.  A ring across nodes is as fast as its slowest
    link: each node has as many ways out as it has members of the group, each of `network`.

    Raises UsageError for what is no number, not positive, or has another unit.

    >>> from schedir import Cluster
    >>> a100 = Cluster(nodes=2, gpus_per_node=8, flops="312TFLOP/s", memory="80GB", hbm="2TB/s",
    ...                nvlink="300GB/s", network="25GB/s", latency="5us")
    >>> f"{a100.all_reduce(1e9, 8):.6f} {a100.all_reduce(1e9, 16):.6f} {a100.send(1e9, 0, 8):.6f}"
    '0.005903 0.009525 0.040005'
    """

    nodes: int
    gpus_per_node: int
    flops: float
    memory: float
    hbm: float
    nvlink: float
    network: float
    host: float | None = None
    disk: float | None = None
    latency: float = 0.0
    kernel_us: float = 0.0

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if value is None and f.default is None:
                continue
            number = number_of(f.name, value)
            if f.name in ("nodes", "gpus_per_node"):
                if number != int(number):
                    raise UsageError(
                        f"cluster: {f.name} is a whole number, not {said(value)}", fields=[f.name]
                    )
                number = int(number)
            object.__setattr__(self, f.name, number)

    @property
    def gpus(self) -> int:
        """How many there are."""
        return self.nodes * self.gpus_per_node

    # ------------------------------------------------------------ messages and sums

    def bandwidth(self, processes: Group) -> float:
        """Bytes per second on the slowest link of a ring of processes; infinite for one alone.

        Raises UsageError, as all that takes processes, for those that are none of the cluster's.
        """
        group = self._group(processes)
        if len(group) < 2:
            return inf
        _, members = np.unique(group // self.gpus_per_node, return_counts=True)
        if len(members) == 1:
            return self.nvlink
        return min(self.nvlink, self.network * int(members.min()))

    def _group(self, processes: Group) -> Processes:
        """The processes of a group, of which there is one at least, and each once."""
        group = np.arange(processes) if isinstance(processes, int) else np.array(processes)
        if not 0 < len({*group.tolist()} & {*range(self.gpus)}) == len(group):
            raise UsageError(
                f"a group has different processes of 0 to {self.gpus - 1}, not {said(processes)}",
                fields=["processes"],
            )
        return group

    def send(self, size: float, source: int, target: int) -> float:
        """Seconds that a message of `size` bytes takes from one process to another.

        latency + size/bandwidth: the cost model of Thakur, Rabenseifner and Gropp, "Optimization
        of Collective Communication Operations in MPICH" (2005), section 3: alpha + n beta.
        """
        return _message(size, self.latency, self.bandwidth([*{source, target}]))

    def all_gather(self, size: float, processes: Group) -> float:
        """Seconds until each of g processes has all of `size` bytes, of which it had a part.

        (g-1) latency + (g-1)/g size/bandwidth: by a ring, as Thakur et al. (2005), section 4.1:
        (p-1) alpha + (p-1)/p n beta.
        """
        group = len(self._group(processes))
        return (group - 1) * _message(size / group, self.latency, self.bandwidth(processes))

    def reduce_scatter(self, size: float, processes: Group) -> float:
        """Seconds until each of g processes has its part of the sum of `size` bytes of each.

        As long as an all-gather, whose messages go the other way: Patarasuk and Yuan, "Bandwidth
        optimal all-reduce algorithms for clusters of workstations" (2009), section 3.  To add is
        free.
        """
        return self.all_gather(size, processes)

    def all_reduce(self, size: float, processes: Group) -> float:
        """Seconds until each of g processes has the sum of `size` bytes of each.

        2(g-1) latency + 2(g-1)/g size/bandwidth: a reduce-scatter and an all-gather (Patarasuk and
        Yuan 2009, section 3; arXiv 1910.02054, section 7.1).
        """
        return self.reduce_scatter(size, processes) + self.all_gather(size, processes)

    def all_reduce_small(self, size: float, processes: Group) -> float:
        """The same of so few bytes that latency decides: by doubling, ceil(log2 g) messages.

        ceil(log2 g) (latency + size/bandwidth): Thakur et al. (2005), section 4.4: lg p (alpha + n
        beta).
        """
        steps = ceil(log2(len(self._group(processes))))
        return steps * _message(size, self.latency, self.bandwidth(processes))

    # ------------------------------------------------------------ one GPU

    def gemm(self, m: int, n: int, k: int, *, itemsize: int = 2) -> float:
        """Seconds that (m, k) x (k, n) takes, of numbers of `itemsize` bytes.

        max(2mnk/flops, itemsize (mk + kn + mn)/hbm): the roofline (Williams, Waterman and Patterson
        2009); no less than a kernel takes to be issued.
        """
        return max(
            2.0 * m * n * k / self.flops,
            itemsize * (m * k + k * n + m * n) / self.hbm,
            self.kernel_us / 1e6,
        )

    def elementwise(self, size: float) -> float:
        """Seconds that a kernel takes which reads and writes `size` bytes in all, and computes next
        to nothing: size/hbm, the flat roof of Williams et al. (2009); no less than a kernel takes
        to be issued."""
        return max(size / self.hbm, self.kernel_us / 1e6)

    def host_transfer(self, size: float) -> float:
        """Seconds that `size` bytes take to or from the host's memory: latency + size/host, as
        data/bandwidth in arXiv 2104.07857, section 4.  Raises UsageError where none is told."""
        return self._transfer(size, "host")

    def disk_transfer(self, size: float) -> float:
        """The same to or from the disk."""
        return self._transfer(size, "disk")

    def _transfer(self, size: float, where: str) -> float:
        bandwidth = getattr(self, where)
        if bandwidth is None:
            raise UsageError(
                f"cluster: nobody tells {where}, the bytes per second to and from the {where}",
                hint=f'{where} = "12GB/s"',
                fields=[where],
            )
        return _message(size, self.latency, bandwidth)

    # ------------------------------------------------------------ costs of a plan

    def costs(
        self,
        plan: Plan,
        sizes: Sizes | None = None,
        costs: Costs | None = None,
        *,
        tp: int = 1,
        dp: int = 1,
    ) -> Costs:
        """Costs in seconds: those that are told stay, and these are filled, unless told:

        - `send`: a message of an activation, or of a gradient, of which each slice is sent by its
          own process where tp > 1; `scatter` cuts these, and `gather` makes them whole.  A stage
          that sends both ways has one cost, that of the longer message.
        - `reduce_grads`: a ring over replicas, as a whole.  Executors begin it under the last
          backward, so that what is left of it at its turn is less.  `reduce_holders`: a ring over
          a stage's holders.
        - `reduce_norm`: 8 bytes over all processes of a replica.
        - `step`: `params` and `optimizer` read and written, `grads` read, at `hbm`.
        - `I` and `W` where only B is told: half of it each.

        F, and B or I and W, are for who knows the model to tell, in seconds.  Bytes are those of
        `sizes`: `activation`, and of one process `params`, `grads` and `optimizer`.  `reduce_tied`
        and what skips cost more than other messages is not known, and stays as it is.

        Process (d, r, t), of replica d, rank r and slice t, is number (d ranks + r) tp + t.

        Raises UsageError where plan.ranks x tp x dp is not the number of GPUs, and for sizes that
        are needed and not told; CostsError where F, or backwards, are not told.

        >>> from schedir import Cluster, Costs, Plan, Sizes
        >>> node = Cluster(nodes=1, gpus_per_node=4, flops="312TFLOP/s", memory="80GB",
        ...                hbm="2TB/s", nvlink="300GB/s", network="25GB/s", latency="10us")
        >>> sizes = Sizes(activation=3e6, params=2e9, grads=2e9, optimizer=12e9)
        >>> filled = node.costs(Plan(4, 8), sizes, Costs(F=0.01, I=0.01, W=0.01))
        >>> filled.send, filled.step
        (2e-05, 0.015)
        """
        costs = Costs() if costs is None else costs
        sizes = Sizes() if sizes is None else sizes
        expect(plan, Plan, "Plan(ranks=4, microbatches=8)")
        expect(sizes, Sizes, "Sizes(activation=16e6)")
        expect(costs, Costs, "Costs(F=0.012, B=0.024)")
        processes = plan.ranks * tp * dp
        if processes != self.gpus:
            raise UsageError(
                f"pp {plan.ranks} x tp {tp} x dp {dp} = {processes} processes are not the "
                f"{self.gpus} GPUs of {self.nodes} x {self.gpus_per_node}",
                fields=["nodes", "gpus_per_node", "ranks", "tp", "dp"],
            )
        filled = _backwards(costs)
        for name, fill in _Filler(self, plan, sizes, tp, dp).fills.items():
            if name not in costs.told:
                each = fill()
                filled[name] = from_grid(each[:1] if (each == each[:1]).all() else each)
        return replace(costs, **filled)


def _backwards(costs: Costs) -> dict[str, Cost]:
    """I and W where only B is told.  Raises CostsError where backwards, or F, are not told."""
    told = costs.told
    halves = [name for name in ("I", "W") if name in told]
    if "F" not in told or not ("B" in told or len(halves) == 2):
        raise CostsError(
            "a cluster fills costs in seconds, and nobody tells those of F, and of B or I and W",
            hint="F=0.012,B=0.024",
        )
    if len(halves) == 1:
        raise CostsError(f"of I and W only {halves[0]} is told beside B", hint="I=0.014,W=0.01")
    return {} if halves else dict.fromkeys(("I", "W"), from_grid(grid(told["B"]) / 2))


class _Filler:
    """What a cluster makes costs of a plan, by bytes; each as `grid` has numbers."""

    def __init__(self, cluster: Cluster, plan: Plan, sizes: Sizes, tp: int, dp: int) -> None:
        self.cluster, self.plan, self.sizes, self.tp, self.dp = cluster, plan, sizes, tp, dp
        self.mesh = mesh_of(plan.ranks, tp, dp)
        self.fills: dict[str, Callable[[], Floats]] = {
            "send": self.send,
            "scatter": self.scatter,
            "gather": self.gather,
            "reduce_grads": self.reduce_grads,
            "reduce_holders": self.reduce_holders,
            "reduce_norm": self.reduce_norm,
            "step": self.step,
        }

    # ------------------------------------------------------------ messages

    def send(self) -> Floats:
        """The longer of the messages that a stage sends, each by the slowest of its links."""
        act, grad = self._leaving("send")
        nodes, links = self.mesh // self.cluster.gpus_per_node, np.full(self.plan.stages, inf)
        within, between = self.cluster.nvlink, min(self.cluster.nvlink, self.cluster.network)
        for stage in np.flatnonzero(self._leaves).tolist():
            a, b = self.plan.holders[:, stage], self.plan.holders[:, stage + 1]
            across = (nodes[:, a] != nodes[:, b]).any()
            links[stage] = between if across else within
        act, grad = (self._messages(x / self.tp, links) for x in (act, grad))
        return np.maximum(act, _of_the_next(grad))

    def scatter(self) -> Floats:
        """Reads and writes a process's own part of what a stage sends."""
        if self.tp == 1:
            return np.zeros((1, 1))
        act, grad = self._leaving("scatter")
        sent = np.maximum(act, _of_the_next(grad))
        each = np.maximum(2 * sent / self.tp / self.cluster.hbm, self.cluster.kernel_us / 1e6)
        return np.where(sent > 0, each, 0.0)

    def gather(self) -> Floats:
        """An all-gather of what a stage receives."""
        if self.tp == 1:
            return np.zeros((1, 1))
        act, grad = self._leaving("gather")
        came = np.maximum(_of_the_next(act), grad)
        links = self._slowest(lambda holders: self.mesh[:, holders].reshape(-1, self.tp))
        return (self.tp - 1) * self._messages(came / self.tp, links)

    def _leaving(self, cost: str) -> tuple[Floats, Floats]:
        """Bytes of each stage's activation and its gradient, where they leave a rank, else 0."""
        act, grad = (self.sizes.each(name, self.plan) for name in ("activation", "gradient"))
        if self._leaves.any() and not act[self._leaves].all():
            raise _unknown(cost, "activation=16MB")
        return act * self._leaves[:, None], grad * self._leaves[:, None]

    @property
    def _leaves(self) -> NDArray[np.bool_]:
        """Of which stages the activation goes to another rank."""
        holders = self.plan.holders
        return np.append((holders[:, 1:] != holders[:, :-1]).any(0), False)

    def _messages(self, size: Floats, links: Floats) -> Floats:
        """Seconds of a message of each stage."""
        return np.where(size > 0, self.cluster.latency + size / links[:, None], 0.0)

    # ------------------------------------------------------------ once a step

    def reduce_grads(self) -> Floats:
        """A ring over the replicas of each holder."""
        return self._rings(
            "reduce_grads", self.dp, lambda holders: self.mesh[:, holders].reshape(self.dp, -1).T
        )

    def reduce_holders(self) -> Floats:
        """A ring over the holders of a stage."""
        rows = self.plan.rows
        return self._rings(
            "reduce_holders", rows,
            lambda holders: self.mesh[:, holders].swapaxes(1, 2).reshape(-1, rows),
        )  # fmt: skip

    def _rings(self, cost: str, members: int, groups: Groups) -> Floats:
        if members == 1:
            return np.zeros((1, 1))
        grads = self.sizes.each("grads", self.plan)
        if not grads.any():
            raise _unknown(cost, "grads=2GB")
        return 2 * (members - 1) * self._messages(grads / members, self._slowest(groups))

    def _slowest(self, groups: Groups) -> Floats:
        """The bandwidth of each stage's slowest group of processes, by its holders."""
        known: dict[tuple[int, ...], float] = {}
        for holders in map(tuple, self.plan.holders.T.tolist()):
            if holders not in known:
                each = groups(np.array(holders))
                known[holders] = min(map(self.cluster.bandwidth, each))
        return np.array([known[holders] for holders in map(tuple, self.plan.holders.T.tolist())])

    def reduce_norm(self) -> Floats:
        """One number in float64 over all processes of a replica."""
        each = [self.cluster.all_reduce_small(8, replica.reshape(-1)) for replica in self.mesh]
        return np.full((1, 1), max(each))

    def step(self) -> Floats:
        """The k-th number is rank k's."""
        names = ("params", "grads", "optimizer")
        params, grads, optimizer = (self.sizes.of(name, self.plan.stages) for name in names)
        if not (params.any() and grads.any()):
            raise _unknown("step", "params=2GB,grads=2GB,optimizer=12GB")
        touched = 2 * params + grads + 2 * optimizer
        each = np.zeros(self.plan.stages)
        for rank, own in enumerate(self.plan.stages_of):
            here = slice(min(rank, self.plan.stages - 1), None)  # what is behind is of no rank
            last = each[here].max() if rank >= self.plan.stages else 0.0
            each[here] = max(last, touched[list(own)].sum() / self.cluster.hbm)
        return each[:, None]


def _of_the_next(each: Floats) -> Floats:
    """By stage what is told for the one before."""
    return np.concatenate([0 * each[:1], each[:-1]])


def _unknown(cost: str, sizes: str) -> UsageError:
    names = [part.partition("=")[0] for part in sizes.split(",")]
    return UsageError(
        f"a cluster fills cost {cost} by bytes of {', '.join(names)}, which nobody tells",
        hint=f"--sizes {sizes}, or Sizes({', '.join(f'{name}=...' for name in names)}), or tell "
        f"{cost} itself",
        fields=names,
    )


def _message(size: float, latency: float, bandwidth: float) -> float:
    if not 0 <= size < inf:
        raise UsageError(f"a message has bytes, from 0 on, not {said(size)}", fields=["size"])
    return latency + size / bandwidth if bandwidth < inf and size else 0.0
