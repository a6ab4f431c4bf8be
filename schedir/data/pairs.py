"""Pairs: two sentences as one sequence, some of their tokens to be found (arXiv 1810.04805)."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.integer[Any]]

MASKED: Final = 0.15  # of the tokens of text are to be found (1810.04805, section 3.1)
SHORTER: Final = 0.1  # of the sequences do not fill their room (appendix A.2)


class Marks(NamedTuple):
    """Tokens that are no text: `cls` begins a sequence, `sep` ends a sentence, `mask` stands for a
    token, `pad` fills up; tokens below `text` are text."""

    cls: int
    sep: int
    mask: int
    pad: int
    text: int


class Pair(NamedTuple):
    """A sequence, each (T,): its tokens; the sentence that each is of, 0 or 1; whether it is there;
    and what is to be found: at masked tokens what they were, at the first place whether the second
    sentence is another than the next, and `ignore` elsewhere."""

    tokens: NDArray[np.int64]
    sentences: NDArray[np.int64]
    there: NDArray[np.bool_]
    targets: NDArray[np.int64]


def pair(
    own: Tokens, other: Tokens, marks: Marks, numbers: np.random.Generator, ignore: int = -1
) -> Pair:
    """A sequence as long as the text `own`, of its begin and what comes next in it, or, as often, a
    begin of the text `other`; 5 tokens at least.

    Of the tokens of text 15 % are to be found, one at least: 80 % of them are masked, 10 % are
    other ones, and 10 % stay (1810.04805, appendix A.1).

    >>> marks = Marks(cls=10, sep=11, mask=12, pad=13, text=10)
    >>> found = pair(np.arange(9), np.zeros(9, int), marks, np.random.default_rng(4))
    >>> found.tokens.tolist(), found.sentences.tolist()
    ([10, 0, 1, 2, 12, 4, 11, 5, 11], [0, 0, 0, 0, 0, 0, 0, 1, 1])
    >>> found.targets.tolist()
    [0, -1, -1, -1, 3, -1, -1, -1, -1]
    """
    room = len(own) - 3
    length = int(numbers.integers(2, room + 1)) if numbers.random() < SHORTER else room
    first = int(numbers.integers(1, length))
    is_other = bool(numbers.random() < 0.5)
    second = other[: length - first] if is_other else own[first:length]
    tokens = np.full(len(own), marks.pad, np.int64)
    tokens[: length + 3] = [marks.cls, *own[:first], marks.sep, *second, marks.sep]
    at = np.arange(len(own))
    sentences = ((at > first + 1) & (at < length + 3)).astype(np.int64)
    text = at[: length + 2][(at[: length + 2] > 0) & (at[: length + 2] != first + 1)]
    masked = numbers.choice(text, max(1, round(MASKED * length)), replace=False)
    targets = np.full(len(own), ignore, np.int64)
    targets[masked], targets[0] = tokens[masked], is_other
    how = numbers.random(len(masked))
    tokens[masked[how < 0.8]] = marks.mask
    changed = masked[how >= 0.9]
    tokens[changed] = numbers.integers(marks.text, size=len(changed))
    return Pair(tokens, sentences, at < length + 3, targets)
