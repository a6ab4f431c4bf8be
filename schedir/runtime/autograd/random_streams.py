"""Random streams: random numbers that depend on stage and microbatch, not on the schedule.

A rank seeds torch's default generators before each call that may draw random numbers. It derives
the seed from a key:

- for a forward or a backward: (seed, step, global microbatch, stage),
- for an optimizer step of one stage: (seed, step, update, stage),
- for an optimizer step of all stages of a rank: (seed, step, update, first stage of the rank).

Within a model, `fork_layer_rng` gives each layer its own key. Random numbers in such a layer do not
depend on the stage that has the layer. If each replica has m microbatches, replica r computes the
global microbatches r * m to (r + 1) * m - 1 of a step. So replicas draw the same numbers as one
replica with all microbatches.

The generator of the CPU uses 32 bits of a key, and the generator of a GPU all 64 bits.

Without a seed this module changes no generator, and modules draw from torch's generators in the
order of the calls.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import index
from typing import Final

import torch

from schedir.errors import ModelError, describe

_MASK_64_BITS: Final = 2**64 - 1


# Purposes of random numbers, so that different purposes have different keys.
FORWARD, BACKWARD, BACKWARD_WEIGHT, UPDATE, _LAYER, _SLICE, _BETWEEN_STEPS = (
    purpose << 32 for purpose in range(1, 8)
)


def mix_bits(number: int) -> int:
    """Return 64 bits that each depend on all 64 bits of a number.

    Different numbers below 2**64 give different results.

    Args:
        number: An integer; its lowest 64 bits are used.

    Returns:
        The next output of splitmix64 with the state `number`. The constants are from Vigna's
        splitmix64.c.

    References:
        Steele, Lea and Flood, Fast splittable pseudorandom number generators, OOPSLA 2014.
    """
    number = number + 0x9E3779B97F4A7C15 & _MASK_64_BITS
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & _MASK_64_BITS
    number = (number ^ number >> 27) * 0x94D049BB133111EB & _MASK_64_BITS
    return number ^ number >> 31


def derive_key(*numbers: int) -> int:
    """Return a 64-bit key that depends on the numbers and on their order.

    Args:
        *numbers: Integers; the lowest 64 bits of each are used.
    """
    bits = 0
    for number in numbers:
        bits = mix_bits(bits ^ (index(number) & _MASK_64_BITS))
    return bits


def list_stream_numbers(microbatches: int, first_number: int = 0, updates: int = 1) -> list[int]:
    """Return the numbers of the microbatches and updates that a rank runs in a step.

    Args:
        microbatches: The number of microbatches of the rank.
        first_number: The number of the rank's first microbatch among the microbatches of all
            replicas.
        updates: The number of optimizer steps.

    Returns:
        The global numbers of the microbatches, and then a number for each update.
    """
    return [
        *range(first_number, first_number + microbatches),
        *(UPDATE | u for u in range(updates)),
    ]


def get_default_generators(device: torch.device) -> list[torch.Generator]:
    """Return torch's default generators that modules on a device use.

    Args:
        device: A device. A CUDA device without an index means the current CUDA device.

    Returns:
        The generator of the CPU, and for a CUDA device also the generator of the device.
    """
    if device.type != "cuda":
        return [torch.default_generator]
    torch.cuda.init()
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]


class RandomStreams:
    """Seeds torch's default generators for the instructions of a rank.

    A step with several updates counts as one step, and each of its microbatches has a different
    number.

    Args:
        seed: The seed, or None to leave torch's generators unchanged.
        device: The device of the rank.
        step: The number of the next step, which is not 0 after loading a checkpoint. Each step adds
            1 to the attribute `step`.
    """

    def __init__(self, seed: int | None, device: torch.device, *, step: int = 0) -> None:
        self.seed = seed
        self.step: int = step
        self.generators: list[torch.Generator] = get_default_generators(device)
        self.step_keys: list[int] = []  # keys of the microbatches, then of the updates
        self.current_key = 0  # key of the current microbatch or update
        self.has_warned: bool = False  # True if `warn_of_draws` has warned

    def begin_step(self, numbers: Sequence[int]) -> None:
        """Compute the keys of the next step, and add 1 to `step`.

        Args:
            numbers: The result of `list_stream_numbers`.
        """
        self.step += 1
        self._set_step_keys(numbers, self.step - 1)

    def begin_without_update(self, numbers: Sequence[int]) -> None:
        """Compute the keys of microbatches between two steps, as in an evaluation.

        The number of the next step does not change.

        Args:
            numbers: The result of `list_stream_numbers`.
        """
        self._set_step_keys(numbers, self.step, _BETWEEN_STEPS)

    def _set_step_keys(self, numbers: Sequence[int], *key_parts: int) -> None:
        if self.seed is not None:
            step_key = derive_key(self.seed, *key_parts)
            self.step_keys = [mix_bits(step_key ^ number) for number in numbers]

    def make_seeded(
        self, purpose: int, stage: int, index: int, run: Callable[[], None] = lambda: None
    ) -> Callable[[], None]:
        """Return a function that seeds the generators and then calls `run`.

        Args:
            purpose: A constant of this module, such as `FORWARD`.
            stage: The number of the stage.
            index: The index of the microbatch on this rank. With m microbatches, the index of
                update u is m + u.
            run: The function to call; the default does nothing.

        Returns:
            A function, or `run` itself if there is no seed.
        """
        if self.seed is None:
            return run
        key_part = purpose | stage

        def run_seeded() -> None:
            global _active_streams
            _active_streams, self.current_key = self, self.step_keys[index]
            seed = mix_bits(self.current_key ^ key_part)
            for generator in self.generators:
                generator.manual_seed(seed)
            run()

        return run_seeded

    @contextmanager
    def warn_of_draws(self, text: str) -> Iterator[None]:
        """Warn, at most once per object, if any code within this context draws random numbers.

        Args:
            text: The warning.
        """
        states = [] if self.has_warned else [generator.get_state() for generator in self.generators]
        yield
        for generator, state in zip(self.generators, states, strict=False):
            if not self.has_warned and not torch.equal(generator.get_state(), state):
                self.has_warned = True
                warnings.warn(text, stacklevel=2)

    @contextmanager
    def preserve_generators(self, *, always: bool = False) -> Iterator[None]:
        """Restore the states of the generators at the end of this context, if there is a seed.

        Args:
            always: True to restore the states even if there is no seed.
        """
        global _active_streams
        if self.seed is None and not always:
            yield
            return
        outer, states = _active_streams, [generator.get_state() for generator in self.generators]
        try:
            yield
        finally:
            _active_streams = outer  # this step may run inside another step
            for generator, state in zip(self.generators, states, strict=True):
                generator.set_state(state)


# The streams of the current step. They are global, like torch's generators: a process runs one
# instruction at a time. A thread-local would not work, because on a GPU autograd runs a backward in
# other threads.
_active_streams: RandomStreams | None = None


def _require_uint32(number: int) -> int:
    """Return the number of a layer or slice, or raise ModelError if it is not in 0 to 2**32 - 1."""
    try:
        if 0 <= (value := index(number)) < 1 << 32:
            return value
    except TypeError:
        pass
    raise ModelError(
        f"the number of a layer or slice must be from 0 to 2**32 - 1, not {describe(number)}"
    )


@contextmanager
def fork_layer_rng(number: int, shard: int | None = None) -> Iterator[None]:
    """Seed torch's default generators within this context for one layer of the model.

        with fork_layer_rng(12):
            x = F.dropout(x, 0.1)

    The random numbers depend only on (seed, step, global microbatch, number, shard). They do not
    depend on the stage of the layer. Contexts with equal `number` draw equal random numbers, so
    each layer needs a different `number`. At the end of the context the generators get their
    earlier states back.

    The context works in a forward of an executor or of `run_sequential`, and when a backward
    recomputes such a forward. Elsewhere it has no effect.

    Args:
        number: The number of the layer in the model, from 0 to 2**32 - 1.
        shard: The tensor-parallel rank, if each rank has a shard of the values. Then each rank
            draws different random numbers. By default all ranks draw the same numbers, for values
            that each rank has in full.

    Raises:
        ModelError: `number` or `shard` is not an integer from 0 to 2**32 - 1.
    """
    streams = _active_streams
    layer_key = _LAYER | _require_uint32(number)
    slice_key = None if shard is None else _SLICE | _require_uint32(shard)
    if streams is None:
        yield
        return
    seed = mix_bits(streams.current_key ^ layer_key)
    if slice_key is not None:
        seed = mix_bits(seed ^ slice_key)
    states = [generator.get_state() for generator in streams.generators]
    for generator in streams.generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(streams.generators, states, strict=True):
            generator.set_state(state)
