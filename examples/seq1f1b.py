"""Seq1F1B (arXiv 2406.03488): each sequence passes through the pipeline in chunks.

    python examples/seq1f1b.py                   # compares it with 1F1B: span, bubble, memory
    schedir check examples/seq1f1b.py:seq1f1b -O sequence_chunks=4 --microbatches 32
    python examples/seq1f1b_run.py               # runs it with a model on four processes

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
    """Return 1F1B of chunks (section 3.2). The warmup is `ranks - rank - 2 + sequence_chunks`.

    After the warmup, forwards and backwards alternate. Backwards run in the order of the sequences,
    and in each sequence from the last chunk to the first. The paper calls this order a partially
    ordered queue.
    """
    sequences = range(0, microbatches, sequence_chunks)
    backwards = concat(
        B.at(first + k) for first in sequences for k in reversed(range(sequence_chunks))
    )
    return weave(microbatches * F, backwards, min(ranks - rank - 2 + sequence_chunks, microbatches))


def count_operations(tokens: float) -> float:
    """Return the operations of a layer for the first `tokens` tokens of a sequence.

    A layer multiplies each token by 12 WIDTH^2 weights. A token attends, on average, to half of the
    tokens.
    """
    return 24 * WIDTH**2 * tokens + 4 * WIDTH * tokens**2 / 2


def balance_chunks(tokens: int, chunks: int) -> list[int]:
    """Return the lengths of chunks that take equal time (section 3.4), computed by bisection."""

    def find_length(share: float) -> int:
        """Return how many first tokens take at most `share` of the time of the sequence."""
        low, high = 0, tokens
        while low < high:
            middle = (low + high + 1) // 2
            if count_operations(middle) <= share * count_operations(tokens):
                low = middle
            else:
                high = middle - 1
        return low

    boundaries = [find_length(k / chunks) for k in range(chunks)] + [tokens]
    return [end - start for start, end in pairwise(boundaries)]


def costs_and_sizes(chunk_lengths: list[int]) -> tuple[Costs, Sizes]:
    """Return the costs of each chunk, and the bytes that its forward saves in a layer.

    A forward of a full sequence takes 1, and a backward 2. A layer saves 34 bytes per token and
    channel (arXiv 2205.05198).
    """
    ends = [sum(chunk_lengths[: k + 1]) for k in range(len(chunk_lengths))]
    chunk_costs = [
        (count_operations(end) - count_operations(end - length)) / count_operations(TOKENS)
        for length, end in zip(chunk_lengths, ends, strict=True)
    ]
    forward_costs = tuple(chunk_costs) * SEQUENCES
    backward_costs = tuple(2 * cost for cost in forward_costs)
    saved_bytes = tuple(34 * WIDTH * length for length in chunk_lengths) * SEQUENCES
    # One row of values applies to all stages.
    return Costs(F=(forward_costs,), B=(backward_costs,)), Sizes(saved=(saved_bytes,))


def timelines() -> Iterator[schedir.Timeline]:
    """Simulate 1F1B of full sequences, then Seq1F1B of chunks of equal length and of equal time."""
    shape = PipelineShape(RANKS, SEQUENCES)
    program = schedir.compile(schedir.schedules.one_f_one_b, shape)
    yield schedir.simulate(program, Costs(F=1, B=2), sizes=Sizes(saved=34 * WIDTH * TOKENS))
    shape = PipelineShape(RANKS, SEQUENCES * CHUNKS, sequence_chunks=CHUNKS)
    for chunk_lengths in ([TOKENS // CHUNKS] * CHUNKS, balance_chunks(TOKENS, CHUNKS)):
        costs, sizes = costs_and_sizes(chunk_lengths)
        program = schedir.compile(seq1f1b, shape, costs=costs)
        yield schedir.simulate(program, costs, sizes=sizes)


def draw(path: str) -> None:
    """Draw 1F1B and Seq1F1B below each other on one time axis."""
    from schedir.viz import compare, save

    unchunked, _, balanced = timelines()
    titles = ["1F1B of complete sequences", f"Seq1F1B: {CHUNKS} chunks of equal time per sequence"]
    save(compare([unchunked, balanced], titles=titles), path)


def main() -> None:
    """Print how much time chunks save, and how much more if all chunks take the same time."""
    names = ("1F1B", "chunks, equal length", "chunks, equal time")
    print(f"{RANKS} ranks, {SEQUENCES} sequences of {TOKENS} tokens; their forwards take 1 each")
    for name, timeline in zip(names, timelines(), strict=True):
        peak = timeline.peak_memory.max() / 1e9
        print(
            f"{name:<21} span {timeline.span:5.2f}  bubble {timeline.bubble:5.1%}  "
            f"holds {peak:5.2f} GB"
        )
    *other_lengths, last_length = balance_chunks(TOKENS, CHUNKS)
    print(
        f"chunks of equal time have {', '.join(map(str, other_lengths))} and {last_length} tokens"
    )


if __name__ == "__main__":
    main()
