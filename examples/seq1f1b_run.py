"""Seq1F1B on four processes over Gloo: gradients equal those of undivided sequences.

    python examples/seq1f1b_run.py

A stage stores the keys and values of each chunk, and later chunks attend to them. The backwards of
later chunks compute gradients of these keys and values. The backward of the chunk adds these
gradients to its own. The result is right only in the order that `check` requires for a shape with
chunks.
"""

import socket
from collections import defaultdict
from collections.abc import Iterable
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from seq1f1b import seq1f1b
from torch import Tensor, nn

import schedir
from schedir.runtime import (
    Executor,
    GlooTransport,
    InProcessExecutor,
    PerMicrobatchBoundary,
    run_sequential,
)

RANKS, SEQUENCES, CHUNKS = 4, 3, 3
BATCH, TOKENS, WIDTH, HEADS, VOCABULARY = 2, 24, 16, 2, 30

PLAN = schedir.PipelineShape(RANKS, SEQUENCES * CHUNKS, sequence_chunks=CHUNKS)
PROGRAM = schedir.compile(seq1f1b, PLAN)
CUT = [11, 8, 5]  # tokens of each chunk; a later chunk is shorter, because it attends to more keys
BOUNDARY = PerMicrobatchBoundary([(BATCH, n, WIDTH) for n in CUT] * SEQUENCES)
# The keyword arguments of every stage for each microbatch.
KEYWORDS = [{"sequence": n, "chunk": k} for n in range(SEQUENCES) for k in range(CHUNKS)]


class Seen(torch.autograd.Function):
    """Append the keys and values of a chunk to those of the earlier chunks of its sequence.

    The shape is (2, batch, heads, tokens, width of a head). `kept` contains the keys and values of
    the earlier chunks, and `owed` the gradients that later chunks have computed for this chunk.
    """

    @staticmethod
    def forward(ctx: Any, own: Tensor, kept: list[Tensor], owed: dict[int, Tensor]) -> Tensor:
        kept.append(own.detach())
        ctx.kept, ctx.owed = kept, owed
        return torch.cat(kept, dim=-2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        lengths = [each.shape[-2] for each in ctx.kept]
        *earlier, own = gradient.split(lengths, dim=-2)
        for chunk, part in enumerate(earlier):
            ctx.owed[chunk] = part + ctx.owed.get(chunk, 0)
        ctx.kept.pop()  # no later forward or backward attends to this chunk
        return own + ctx.owed.pop(len(earlier), 0), None, None


class Block(nn.Module):
    """Causal attention to all earlier tokens of the sequence, and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
        self.kept, self.owed = defaultdict(list), defaultdict(dict)  # keys: numbers of sequences

    def forward(self, x: Tensor, sequence: int, chunk: int) -> Tensor:
        assert len(self.kept[sequence]) == chunk, "chunks go forward from the first on"
        mixed = self.mix(self.norm(x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        q, (k, v) = mixed[0], Seen.apply(mixed[1:], self.kept[sequence], self.owed[sequence])
        before = k.shape[-2] - q.shape[-2]
        sees = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(before)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=sees)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class First(nn.Module):
    """Embeddings of tokens and positions, then a block."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.block = Block()

    def forward(self, tokens: Tensor, sequence: int, chunk: int) -> Tensor:
        begin = sum(CUT[:chunk])
        place = torch.arange(begin, begin + tokens.shape[1])
        return self.block(self.token(tokens) + self.place(place), sequence, chunk)


class Last(nn.Module):
    """A block, then the logits of the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor, sequence: int, chunk: int) -> Tensor:
        return self.head(self.block(x, sequence, chunk))


def loss(y: Tensor, target: Tensor) -> Tensor:
    """Return the sum over tokens, so that the losses of chunks add up to that of the sequence."""
    return F.cross_entropy(y.flatten(0, 1), target.flatten(), reduction="sum")


def model() -> list[nn.Module]:
    """Return the four stages of the model, with the same weights in every process."""
    torch.manual_seed(0)
    return [First(), Block(), Block(), Last()]


def batch() -> tuple[Tensor, Tensor]:
    """Return the tokens of full sequences, and the next token of each."""
    tokens = torch.randint(VOCABULARY, (SEQUENCES, BATCH, TOKENS + 1))
    return tokens[..., :-1], tokens[..., 1:]


def cut(whole: Tensor) -> list[Tensor]:
    """Return the chunks of all sequences, one sequence after the other."""
    return [chunk for one in whole for chunk in one.split(CUT, dim=1)]


def gradients(stages: Iterable[nn.Module]) -> list[Tensor]:
    """Return the gradients of all parameters of some stages."""
    return [p.grad.clone() for stage in stages for p in stage.parameters()]


def process(rank: int, port: int) -> None:
    """Run a step as one rank, and compare its gradients with those of a loop over chunks."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://localhost:{port}", rank=rank, world_size=RANKS
    )
    stages, (x, y) = model(), batch()
    own = Executor(PROGRAM, rank, stages, GlooTransport(PROGRAM), loss=loss, boundary=BOUNDARY)
    own.step(cut(x), cut(y), keywords=KEYWORDS)
    plain = model()
    run_sequential(plain, cut(x), cut(y), loss=loss, keywords=KEYWORDS, program=PROGRAM)
    assert all(map(torch.equal, gradients([stages[rank]]), gradients([plain[rank]])))
    dist.destroy_process_group()


def main() -> None:
    """Compare full sequences, a loop over chunks, virtual ranks and four processes."""
    torch.set_num_threads(1)
    stages, (x, y) = model(), batch()

    whole = deepcopy(stages)
    each = [{"sequence": n, "chunk": 0} for n in range(SEQUENCES)]
    total = run_sequential(whole, x, y, loss=loss, keywords=each)
    print(f"complete sequences   loss {float(total):.4f}")

    plain = deepcopy(stages)
    total = run_sequential(plain, cut(x), cut(y), loss=loss, keywords=KEYWORDS, program=PROGRAM)
    print(f"loop over chunks     loss {float(total):.4f}")
    for one, other in zip(gradients(whole), gradients(plain), strict=True):
        assert (one - other).norm() <= 1e-6 * one.norm()  # chunks change the order of additions

    ranks = InProcessExecutor(PROGRAM, deepcopy(stages), loss=loss, boundary=BOUNDARY)
    print(f"virtual ranks        loss {float(ranks.step(cut(x), cut(y), keywords=KEYWORDS)):.4f}")
    virtual = gradients(ranks.executors[r].stages[r].module for r in range(RANKS))
    assert all(map(torch.equal, virtual, gradients(plain)))

    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    mp.spawn(process, (port,), nprocs=RANKS)
    print("the gradients of virtual ranks and of processes equal those of the loop, bit by bit;")
    print("they differ from those of complete sequences by at most 1e-6")


if __name__ == "__main__":
    main()
