"""Run Seq1F1B on four Gloo processes, and compare gradients with those of complete sequences.

    python examples/seq1f1b_run.py

The script prints the loss of complete sequences, of a plain loop over chunks, and of virtual ranks.
It asserts that virtual ranks and processes compute the same gradients as the loop, bit by bit. The
gradients of complete sequences may differ from them by 1e-6.

A stage stores the keys and values of each chunk, and later chunks attend to them. The backwards of
later chunks compute gradients of these keys and values. The backward of the chunk adds these
gradients to its own. The result is correct only in the order that `check` requires for a shape with
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

SHAPE = schedir.PipelineShape(RANKS, SEQUENCES * CHUNKS, sequence_chunks=CHUNKS)
PROGRAM = schedir.compile(seq1f1b, SHAPE)
# The tokens of each chunk. A later chunk attends to more keys, so it is shorter.
CHUNK_LENGTHS = [11, 8, 5]
BOUNDARY = PerMicrobatchBoundary([(BATCH, n, WIDTH) for n in CHUNK_LENGTHS] * SEQUENCES)
# The keyword arguments of every stage for each microbatch.
KEYWORDS = [{"sequence": n, "chunk": k} for n in range(SEQUENCES) for k in range(CHUNKS)]


class ExtendKeysAndValues(torch.autograd.Function):
    """Append the keys and values of a chunk to those of the earlier chunks of its sequence.

    The shape is (2, batch, heads, tokens, width of a head). `cached` contains the keys and values
    of the earlier chunks. `later_gradients` contains, by the number of a chunk, the sum of the
    gradients that later chunks computed for it.
    """

    @staticmethod
    def forward(
        ctx: Any, keys_values: Tensor, cached: list[Tensor], later_gradients: dict[int, Tensor]
    ) -> Tensor:
        cached.append(keys_values.detach())
        ctx.cached, ctx.later_gradients = cached, later_gradients
        return torch.cat(cached, dim=-2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        lengths = [keys_values.shape[-2] for keys_values in ctx.cached]
        *earlier_gradients, local_gradient = gradient.split(lengths, dim=-2)
        for chunk, chunk_gradient in enumerate(earlier_gradients):
            ctx.later_gradients[chunk] = chunk_gradient + ctx.later_gradients.get(chunk, 0)
        ctx.cached.pop()  # no other forward or backward attends to this chunk
        return local_gradient + ctx.later_gradients.pop(len(earlier_gradients), 0), None, None


class Block(nn.Module):
    """Causal attention to all earlier tokens of the sequence, then a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
        # By the number of the sequence.
        self.cached, self.later_gradients = defaultdict(list), defaultdict(dict)

    def forward(self, x: Tensor, sequence: int, chunk: int) -> Tensor:
        assert len(self.cached[sequence]) == chunk, (
            "the forwards of a sequence must run from its first chunk to its last"
        )
        qkv = self.qkv(self.norm(x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        q, keys_values = qkv[0], qkv[1:]
        k, v = ExtendKeysAndValues.apply(
            keys_values, self.cached[sequence], self.later_gradients[sequence]
        )
        earlier_tokens = k.shape[-2] - q.shape[-2]
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(earlier_tokens)
        attention = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(attention.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class FirstStage(nn.Module):
    """Embeddings of tokens and positions, then a block."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.block = Block()

    def forward(self, tokens: Tensor, sequence: int, chunk: int) -> Tensor:
        start = sum(CHUNK_LENGTHS[:chunk])
        positions = torch.arange(start, start + tokens.shape[1])
        return self.block(self.token(tokens) + self.position(positions), sequence, chunk)


class LastStage(nn.Module):
    """A block, then the logits of the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor, sequence: int, chunk: int) -> Tensor:
        return self.head(self.block(x, sequence, chunk))


def loss(y: Tensor, target: Tensor) -> Tensor:
    """Return the sum over tokens. So the loss of a sequence is the sum of those of its chunks."""
    return F.cross_entropy(y.flatten(0, 1), target.flatten(), reduction="sum")


def build_stages() -> list[nn.Module]:
    """Return the four stages of the model, with the same weights in every process."""
    torch.manual_seed(0)
    return [FirstStage(), Block(), Block(), LastStage()]


def make_batch() -> tuple[Tensor, Tensor]:
    """Return the tokens of full sequences, and the next token of each."""
    tokens = torch.randint(VOCABULARY, (SEQUENCES, BATCH, TOKENS + 1))
    return tokens[..., :-1], tokens[..., 1:]


def split_into_chunks(sequences: Tensor) -> list[Tensor]:
    """Return the chunks of all sequences, one sequence after the other."""
    return [chunk for tokens in sequences for chunk in tokens.split(CHUNK_LENGTHS, dim=1)]


def get_gradients(stages: Iterable[nn.Module]) -> list[Tensor]:
    """Return the gradients of all parameters of `stages`."""
    return [p.grad.clone() for stage in stages for p in stage.parameters()]


def run_rank(rank: int, port: int) -> None:
    """Run a step as one rank, and compare its gradients with those of a loop over chunks."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://localhost:{port}", rank=rank, world_size=RANKS
    )
    stages, (x, y) = build_stages(), make_batch()
    executor = Executor(PROGRAM, rank, stages, GlooTransport(PROGRAM), loss=loss, boundary=BOUNDARY)
    executor.step(split_into_chunks(x), split_into_chunks(y), keywords=KEYWORDS)
    loop_stages = build_stages()
    run_sequential(
        loop_stages,
        split_into_chunks(x),
        split_into_chunks(y),
        loss=loss,
        keywords=KEYWORDS,
        program=PROGRAM,
    )
    assert all(map(torch.equal, get_gradients([stages[rank]]), get_gradients([loop_stages[rank]])))
    dist.destroy_process_group()


def main() -> None:
    """Compare full sequences, a loop over chunks, virtual ranks and four processes."""
    torch.set_num_threads(1)
    stages, (x, y) = build_stages(), make_batch()

    unchunked_stages = deepcopy(stages)
    unchunked_keywords = [{"sequence": n, "chunk": 0} for n in range(SEQUENCES)]
    loss_sum = run_sequential(unchunked_stages, x, y, loss=loss, keywords=unchunked_keywords)
    print(f"complete sequences   loss {float(loss_sum):.4f}")

    loop_stages = deepcopy(stages)
    loss_sum = run_sequential(
        loop_stages,
        split_into_chunks(x),
        split_into_chunks(y),
        loss=loss,
        keywords=KEYWORDS,
        program=PROGRAM,
    )
    print(f"loop over chunks     loss {float(loss_sum):.4f}")
    for unchunked, chunked in zip(
        get_gradients(unchunked_stages), get_gradients(loop_stages), strict=True
    ):
        # Chunks change the order of additions, so the gradients differ by rounding errors.
        assert (unchunked - chunked).norm() <= 1e-6 * unchunked.norm()

    virtual_ranks = InProcessExecutor(PROGRAM, deepcopy(stages), loss=loss, boundary=BOUNDARY)
    loss_sum = virtual_ranks.step(split_into_chunks(x), split_into_chunks(y), keywords=KEYWORDS)
    print(f"virtual ranks        loss {float(loss_sum):.4f}")
    virtual_gradients = get_gradients(
        virtual_ranks.executors[r].stages[r].module for r in range(RANKS)
    )
    assert all(map(torch.equal, virtual_gradients, get_gradients(loop_stages)))

    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    mp.spawn(run_rank, (port,), nprocs=RANKS)
    print("the gradients of virtual ranks and of processes equal those of the loop, bit by bit;")
    print("they differ from those of complete sequences by at most 1e-6")


if __name__ == "__main__":
    main()
