"""Seq1F1B (arXiv 2406.03488): each sequence passes the pipeline in causal chunks.

    python examples/seq1f1b.py                   # compared with 1F1B: span, bubble, memory
    schedir check examples/seq1f1b.py:seq1f1b -O sequence_chunks=4 --microbatches 32
    python examples/seq1f1b_run.py               # with a model, on four processes

A later chunk attends to the keys and values of the earlier ones.  So a stage runs the forwards of a
sequence from its first chunk to its last, and the backwards from the last to the first.
`PipelineShape(sequence_chunks=4)` declares the chunks, and `check` refuses any other order.
"""

from collections.abc import Iterator
from itertools import pairwise

import schedir
from schedir import B, Costs, F, PipelineShape, RankSchedule, Sizes, weave
from schedir.schedule_algebra import concat

RANKS, SEQUENCES, CHUNKS = 4, 8, 4
TOKENS, WIDTH = 32768, 4096


def seq1f1b(rank: int, ranks: int, microbatches: int, sequence_chunks: int) -> RankSchedule:
    """1F1B of chunks (section 3.2): P - rank - 2 + k forwards, then by turns.

    Backwards take the earliest sequence that is there, and of it the last chunk first: the
    paper's partially ordered queue.
    """
    sequences = range(0, microbatches, sequence_chunks)
    backwards = concat(
        B.at(first + k) for first in sequences for k in reversed(range(sequence_chunks))
    )
    return weave(microbatches * F, backwards, min(ranks - rank - 2 + sequence_chunks, microbatches))


def work(tokens: float) -> float:
    """What a layer does for the first so many tokens of a sequence, in operations: for each token
    its products with 12 WIDTH^2 weights, and with half of the tokens so far, as keys and values."""
    return 24 * WIDTH**2 * tokens + 4 * WIDTH * tokens**2 / 2


def lengths(tokens: int, chunks: int) -> list[int]:
    """How long the chunks are that all take the same time (section 3.4, by bisection)."""

    def most(share: float) -> int:
        low, high = 0, tokens
        while low < high:
            half = (low + high + 1) // 2
            low, high = (half, high) if work(half) <= share * work(tokens) else (low, half - 1)
        return low

    ends = [most(k / chunks) for k in range(chunks)] + [tokens]
    return [b - a for a, b in pairwise(ends)]


def costs_and_sizes(cut: list[int]) -> tuple[Costs, Sizes]:
    """What each chunk costs, where a whole sequence has a forward of 1 and a backward of 2, and
    what a layer saves of it (34 bytes per token and channel, arXiv 2205.05198)."""
    ends = [sum(cut[: k + 1]) for k in range(len(cut))]
    each = [(work(end) - work(end - n)) / work(TOKENS) for n, end in zip(cut, ends, strict=True)]
    forward = tuple(each) * SEQUENCES
    backward = tuple(2 * cost for cost in forward)
    saved = tuple(34 * WIDTH * n for n in cut) * SEQUENCES
    return Costs(F=(forward,), B=(backward,)), Sizes(saved=(saved,))  # one row: all stages alike


def timelines() -> Iterator[schedir.Timeline]:
    """1F1B of whole sequences, then chunks of one length, then chunks that take one time."""
    shape = PipelineShape(RANKS, SEQUENCES)
    program = schedir.compile(schedir.schedules.one_f_one_b, shape)
    yield schedir.simulate(program, Costs(F=1, B=2), sizes=Sizes(saved=34 * WIDTH * TOKENS))
    shape = PipelineShape(RANKS, SEQUENCES * CHUNKS, sequence_chunks=CHUNKS)
    for cut in ([TOKENS // CHUNKS] * CHUNKS, lengths(TOKENS, CHUNKS)):
        costs, sizes = costs_and_sizes(cut)
        program = schedir.compile(seq1f1b, shape, costs=costs)
        yield schedir.simulate(program, costs, sizes=sizes)


def draw(path: str) -> None:
    """1F1B and Seq1F1B, below each other on one time axis."""
    from schedir.viz import compare, save

    plain, _, balanced = timelines()
    titles = ["1F1B of whole sequences", f"Seq1F1B: {CHUNKS} chunks of each, of one time"]
    save(compare([plain, balanced], titles=titles), path)


def main() -> None:
    """What chunks are worth, and what cutting them by time is."""
    names = ("1F1B", "even chunks", "chunks of one time")
    print(f"{RANKS} ranks, {SEQUENCES} sequences of {TOKENS} tokens; a whole forward takes 1")
    for name, run in zip(names, timelines(), strict=True):
        most = run.peak_memory.max() / 1e9
        print(f"{name:<21} span {run.span:5.2f}  bubble {run.bubble:5.1%}  holds {most:5.2f} GB")
    print(f"lengths of chunks: {lengths(TOKENS, CHUNKS)}")


if __name__ == "__main__":
    main()
