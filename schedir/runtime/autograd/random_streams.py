"""Random streams: what a module draws depends on its stage and microbatch, not on timing.

A rank seeds torch's default generators before whatever may draw: before a forward or a backward
by a key of (seed, step, global microbatch, stage), before an optimizer by one of (seed, step,
update, first own stage).  Modules that know their layers say so by `fork_layer_rng`, and then how
layers are divided into stages changes nothing either.  A rank of replica r computes the global
microbatches r * m, ..., r * m + m - 1 of a step, so that replicas draw as one that has them all.

The CPU's generator takes 32 bits of a key, and a GPU's all 64.

Without a seed nothing of this is done: modules draw from torch's generators as they come.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import index
from typing import Final, Protocol

import torch
from torch import Tensor

from schedir.errors import ModelError, describe

_MASK_64_BITS: Final = 2**64 - 1


# What numbers are drawn for: they are unlike those for all else.
FORWARD, BACKWARD, BACKWARD_WEIGHT, UPDATE, _LAYER, _SLICE, _BETWEEN_STEPS = (
    purpose << 32 for purpose in range(1, 8)
)


def mix_bits(number: int) -> int:
    """64 bits, each of which depends on all 64 of `number`; no two have the same.

    splitmix64 (Steele, Lea and Flood, OOPSLA 2014; the constants are those of Vigna's
    splitmix64.c): what its state `number` gives next.
    """
    number = number + 0x9E3779B97F4A7C15 & _MASK_64_BITS
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & _MASK_64_BITS
    number = (number ^ number >> 27) * 0x94D049BB133111EB & _MASK_64_BITS
    return number ^ number >> 31


def derive_key(*numbers: int) -> int:
    """64 bits for a list of numbers: others for another list, or another order."""
    bits = 0
    for number in numbers:
        bits = mix_bits(bits ^ (index(number) & _MASK_64_BITS))
    return bits


def list_stream_numbers(microbatches: int, first_number: int = 0, updates: int = 1) -> list[int]:
    """The numbers of what a rank runs in a step, of which `first_number` is that of its first
    microbatch among those of all replicas."""
    return [
        *range(first_number, first_number + microbatches),
        *(UPDATE | u for u in range(updates)),
    ]


class Generator(Protocol):
    """What is asked of a torch.Generator."""

    def manual_seed(self, seed: int, /) -> object: ...
    def get_state(self) -> Tensor: ...
    def set_state(self, state: Tensor, /) -> object: ...


def get_default_generators(device: torch.device) -> list[Generator]:
    """The generators from which modules on a device draw unless they bring their own."""
    if device.type != "cuda":
        return [torch.default_generator]
    torch.cuda.init()
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]


class RandomStreams:
    """What a rank's modules draw from.

    `step` is the number of the next step: how many have begun, unless it is set, as by who goes on
    from a checkpoint.  A step of several updates is one step, and its microbatches have numbers of
    their own.
    """

    def __init__(
        self,
        seed: int | None,
        device: torch.device,
        *,
        step: int = 0,
    ) -> None:
        self.seed, self.step = seed, step
        self.generators = get_default_generators(device)
        self.step_keys: list[int] = []  # of the numbers that a program has, in this step
        self.current_key = 0  # of what is under way
        self.has_warned = False  # of draws that are others for each copy of a weight

    def begin_step(self, numbers: Sequence[int]) -> None:
        """Make ready for a step of microbatches and updates with these numbers, as
        `list_stream_numbers`."""
        self.step += 1
        self._set_step_keys(numbers, self.step - 1)

    def begin_without_update(self, numbers: Sequence[int]) -> None:
        """Make ready for microbatches between two steps, which no step is the later for."""
        self._set_step_keys(numbers, self.step, _BETWEEN_STEPS)

    def _set_step_keys(self, numbers: Sequence[int], *key_parts: int) -> None:
        if self.seed is not None:
            step = derive_key(self.seed, *key_parts)
            self.step_keys = [mix_bits(step ^ number) for number in numbers]

    def make_seeded(
        self, purpose: int, stage: int, index: int, run: Callable[[], None] = lambda: None
    ) -> Callable[[], None]:
        """The same as `run`, with numbers of its own: of a purpose, a stage, and a microbatch, by
        its `index` on this rank; updates come behind the last.
        """
        if self.seed is None:
            return run
        what = purpose | stage

        def on() -> None:
            global _active_streams
            _active_streams, self.current_key = self, self.step_keys[index]
            seed = mix_bits(self.current_key ^ what)
            for generator in self.generators:
                generator.manual_seed(seed)
            run()

        return on

    @contextmanager
    def warn_of_draws(self, text: str) -> Iterator[None]:
        """Warn, once, if anything draws within this context."""
        before = [] if self.has_warned else [generator.get_state() for generator in self.generators]
        yield
        for generator, state in zip(self.generators, before, strict=False):
            if not self.has_warned and not torch.equal(generator.get_state(), state):
                self.has_warned = True
                warnings.warn(text, stacklevel=2)

    @contextmanager
    def preserve_generators(self, *, always: bool = False) -> Iterator[None]:
        """After this context the generators are as they were before, if there is a seed."""
        global _active_streams
        if self.seed is None and not always:
            yield
            return
        outer, before = _active_streams, [generator.get_state() for generator in self.generators]
        try:
            yield
        finally:
            _active_streams = outer  # of a step within whose forward this one runs
            for generator, state in zip(self.generators, before, strict=True):
                generator.set_state(state)


# Whose step runs.  A global, as torch's generators are: in one process, one instruction runs at
# a time, on a GPU also where backward is in autograd's own threads.
_active_streams: RandomStreams | None = None


def _require_uint32(number: int) -> int:
    """A number of a layer or a slice.  Raises ModelError for what is none from 0 to 2**32 - 1."""
    try:
        if 0 <= (small := index(number)) < 1 << 32:
            return small
    except TypeError:
        pass
    raise ModelError(
        f"layers and slices are numbered from 0 to 2**32 - 1, not by {describe(number)}"
    )


@contextmanager
def fork_layer_rng(number: int, shard: int | None = None) -> Iterator[None]:
    """Within this context, torch's default generators draw for a layer of that number in the model.

        with layer(12):
            x = F.dropout(x, 0.1)

    What is drawn depends on (seed, step, global microbatch, number) alone, and not on the stage in
    which the layer is.  All tensor-parallel ranks draw the same, as they must of what each holds
    whole; of what they share out, the number of its `shard` lets each draw its own.  Contexts of
    the same numbers draw the same: a layer has one.  After it, what is around goes on as before.

    In a forward, or what a backward recomputes of one, of an executor or `reference`.  Elsewhere
    this does nothing, and generators are as they come.
    """
    drawing = _active_streams
    what = _LAYER | _require_uint32(number)
    part = None if shard is None else _SLICE | _require_uint32(shard)
    if drawing is None:
        yield
        return
    seed = mix_bits(drawing.current_key ^ what)
    if part is not None:
        seed = mix_bits(seed ^ part)
    before = [generator.get_state() for generator in drawing.generators]
    for generator in drawing.generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(drawing.generators, before, strict=True):
            generator.set_state(state)
