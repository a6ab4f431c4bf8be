"""Seq1F1B (arXiv 2406.03488): each sequence passes through the pipeline in chunks.

    python examples/seq1f1b.py                   # compared with 1F1B: span, bubble, memory
    schedir check examples/seq1f1b.py:seq1f1b -O sequence_chunks=4 --microbatches 32
    python examples/seq1f1b_run.py               # with a model, on four processes

A later chunk of a sequence attends to the keys and values of the earlier chunks. So a stage runs
the forwards of a sequence from its first chunk to its last, and the backwards from the last to the
first. `PipelineShape(sequence_chunks=4)` declares the chunks, and `check` refuses any other order.
"""

from collections.abc import Iterator
from itertools import pairwise

import schedir
from schedir import B, Costs, F, PipelineShape, RankSchedule, Sizes, weave
from schedir.schedule_algebra import concat

RANKS, SEQUENCES, CHUNKS = 4, 8, 4
TOKENS, WIDTH = 32768, 4096


def seq1f1b(rank: int, ranks: int, microbatches: int, sequence_chunks: int) -> RankSchedule:
    """Return 1F1B of chunks (section 3.2): P - rank - 2 + k forwards, then one of each in turn.

    A backward takes the earliest sequence that has gone forward, and the last chunk of this
    sequence first. This is the partially ordered queue of the paper.
    """
    sequences = range(0, microbatches, sequence_chunks)
    backwards = concat(
        B.at(first + k) for first in sequences for k in reversed(range(sequence_chunks))
    )
    return weave(microbatches * F, backwards, min(ranks - rank - 2 + sequence_chunks, microbatches))


def work(tokens: float) -> float:
    """Return the operations of a layer for the first tokens of a sequence.

    Each token has products with 12 WIDTH^2 weights and, in the mean, with the keys and values of
    half of the tokens.
    """
    return 24 * WIDTH**2 * tokens + 4 * WIDTH * tokens**2 / 2


def lengths(tokens: int, chunks: int) -> list[int]:
    """Return the lengths of chunks that all take the same time (section 3.4), by bisection."""

    def most(share: float) -> int:
        low, high = 0, tokens
        while low < high:
            half = (low + high + 1) // 2
            low, high = (half, high) if work(half) <= share * work(tokens) else (low, half - 1)
        return low

    ends = [most(k / chunks) for k in range(chunks)] + [tokens]
    return [b - a for a, b in pairwise(ends)]


def costs_and_sizes(cut: list[int]) -> tuple[Costs, Sizes]:
    """Return the costs of each chunk, and the bytes that a layer saves of it.

    A forward of a full sequence takes 1, and a backward 2. A layer saves 34 bytes per token and
    channel (arXiv 2205.05198).
    """
    ends = [sum(cut[: k + 1]) for k in range(len(cut))]
    each = [(work(end) - work(end - n)) / work(TOKENS) for n, end in zip(cut, ends, strict=True)]
    forward = tuple(each) * SEQUENCES
    backward = tuple(2 * cost for cost in forward)
    saved = tuple(34 * WIDTH * n for n in cut) * SEQUENCES
    return Costs(F=(forward,), B=(backward,)), Sizes(saved=(saved,))  # one row: all stages alike


def timelines() -> Iterator[schedir.Timeline]:
    """Simulate 1F1B of full sequences, of chunks of equal length, and of chunks of equal time."""
    shape = PipelineShape(RANKS, SEQUENCES)
    program = schedir.compile(schedir.schedules.one_f_one_b, shape)
    yield schedir.simulate(program, Costs(F=1, B=2), sizes=Sizes(saved=34 * WIDTH * TOKENS))
    shape = PipelineShape(RANKS, SEQUENCES * CHUNKS, sequence_chunks=CHUNKS)
    for cut in ([TOKENS // CHUNKS] * CHUNKS, lengths(TOKENS, CHUNKS)):
        costs, sizes = costs_and_sizes(cut)
        program = schedir.compile(seq1f1b, shape, costs=costs)
        yield schedir.simulate(program, costs, sizes=sizes)


def draw(path: str) -> None:
    """Draw 1F1B and Seq1F1B below each other on one time axis."""
    from schedir.viz import compare, save

    plain, _, balanced = timelines()
    titles = ["1F1B of complete sequences", f"Seq1F1B: {CHUNKS} chunks of equal time per sequence"]
    save(compare([plain, balanced], titles=titles), path)


def main() -> None:
    """Print how much time chunks save, and how much more if all chunks take the same time."""
    names = ("1F1B", "chunks, equal length", "chunks, equal time")
    print(f"{RANKS} ranks, {SEQUENCES} sequences of {TOKENS} tokens; their forwards take 1 each")
    for name, run in zip(names, timelines(), strict=True):
        most = run.peak_memory.max() / 1e9
        print(f"{name:<21} span {run.span:5.2f}  bubble {run.bubble:5.1%}  holds {most:5.2f} GB")
    *first, last = lengths(TOKENS, CHUNKS)
    print(f"chunks of equal time have {', '.join(map(str, first))} and {last} tokens")


if __name__ == "__main__":
    main()
