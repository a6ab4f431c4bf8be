"""Define the challenges of a studio: ten problems with a goal and a proved lower bound."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from schedir.commands.studio.state import StudioState, make_state_request
from schedir.errors import UsageError
from schedir.io.program_request import Request
from schedir.predict.possible_saving import RELATIVE_TOLERANCE


class Challenge(NamedTuple):
    """A problem for the user, with the state of the page at its start.

    Attributes:
        title: A title of a few words.
        text: A description of the task, and of the idea behind it.
        hint: A step towards a solution.
        goal: A schedule with at most this span solves the challenge.
        bound: The lower bound on the span within the memory limit, which `lower_bound` proves.
        options: The options that a solution must keep.
        schedule: The schedule at the start.
        code: The code at the start, or "".
        start: Options at the start that a solution may change.
        includes_split_backwards: True if the bound applies also to schedules with split backwards.
    """

    title: str
    text: str
    hint: str
    goal: float
    bound: float
    options: dict[str, str]
    schedule: str = "one_f_one_b"
    code: str = ""
    start: tuple[tuple[str, str], ...] = ()
    includes_split_backwards: bool = True

    def make_state(self, name: str) -> dict[str, Any]:
        """Return the state at the start, as JSON.

        Args:
            name: The name of the challenge.
        """
        options = self.options | dict(self.start)
        state = StudioState(self.schedule, code=self.code, challenge=name, options=options)
        return state.to_json()


_SHAPE: Final = {"ranks": "4", "microbatches": "8", "sizes": "saved=1GB"}
_FULL: Final = _SHAPE | {"costs": "F=1,B=2"}
_SPLIT: Final = _SHAPE | {"costs": "F=1,I=1,W=1"}
_ONE_BY_ONE: Final = """\
from schedir import B, F


def mine(rank, ranks, microbatches):
    return microbatches * (F + B)
"""
_HANG: Final = """\
from schedir import B, F


def mine(rank, ranks, microbatches):
    warmup = min(rank, microbatches)
    return warmup * F + (microbatches - warmup) * (F + B) + warmup * B
"""
CHALLENGES: Final = {
    "fill-and-drain": Challenge(
        "Fill and drain",
        "The ranks work one after the other: each microbatch passes forward and back before the "
        "next one begins. Let several microbatches fill the pipeline.",
        "A rank can run all its forwards before its first backward.",
        21, 21, _FULL | {"microbatches": "4"}, code=_ONE_BY_ONE, includes_split_backwards=False,
    ),
    "one-forward-one-backward": Challenge(
        "One forward, one backward",
        "GPipe keeps the activations of all 8 microbatches. A rank has memory for 4. Find an order "
        "that fits, and that takes no more time than GPipe.",
        "A rank frees the memory of a microbatch with its backward. Choose a schedule that "
        "alternates.",
        33, 33, _FULL | {"memory_limit": "4GB"}, schedule="gpipe", includes_split_backwards=False,
    ),
    "interleaving": Challenge(
        "Interleaving",
        "Each rank has two smaller stages, so a microbatch reaches the last rank in half the time. "
        "Use this to shorten the pipeline's start and end.",
        "Compare looped_dfs with interleaved.",
        28.5, 28.5,
        _SHAPE | {"costs": "F=0.5,I=0.5,W=0.5", "stages_per_rank": "2", "memory_limit": "11GB"},
        schedule="looped_dfs", includes_split_backwards=False,
    ),
    "zero-bubble": Challenge(
        "Zero bubble",
        "A backward has two parts. I gives the gradient of the inputs, for which another stage "
        "waits. W gives the gradient of the weights, for which no rank waits. Fill the idle time.",
        "The schedules zb_h1 and zb_h2 delay W.",
        27, 27, _SPLIT | {"memory_limit": "4GB"},
    ),
    "v-shape": Challenge(
        "A placement like a V",
        "Each rank has two stages. In a V, rank 0 has the first stage and the last one, so its "
        "first backward begins early. Leave no idle time but that of the first activation.",
        "Set the placement, and choose a schedule for it.",
        51, 51, _SPLIT | {"stages_per_rank": "2", "memory_limit": "8GB"},
        schedule="looped_dfs", start=(("memory_limit", "16GB"),),
    ),
    "less-memory": Challenge(
        "Less memory",
        "The same stages in a V, but a rank has memory for 6 of them instead of 8. What does that "
        "cost?",
        "Two schedules begin with v_.",
        53, 53, _SPLIT | {"stages_per_rank": "2", "placement": "vee", "memory_limit": "6GB"},
        schedule="v_min",
    ),
    "uneven-stages": Challenge(
        "Uneven stages",
        "The last stage takes twice as long, as with a large vocabulary. Its rank decides the "
        "length of the step: let it never wait once it has begun.",
        "The rank waits in the middle of the step. Split its backwards.",
        51, 51,
        _SHAPE | {"costs": "F=1:1:1:2,I=1:1:1:2,W=1:1:1:2", "memory_limit": "4GB"},
    ),
    "slow-links": Challenge(
        "Slow links",
        "A message takes half as long as a forward, and a rank has memory for 7 microbatches. Hide "
        "the messages behind work.",
        "More microbatches in flight hide more. Try schedules that begin with more forwards.",
        29, 28.5, _SHAPE | {"costs": "F=1,I=1,W=1,send=0.5", "memory_limit": "7GB"},
    ),
    "weight-gathers": Challenge(
        "Gathers of weights",
        "With ZeRO 3, a rank gathers the weights of a stage before it computes. With one unsharded "
        "stage at once, each gather is a wait. Hide all gathers but the first.",
        "At options, unsharded_stages=1 limits the rank. Press B to see what ranks wait for.",
        51.5, 51,
        _SHAPE | {"costs": "F=1,I=1,W=1,unshard=0.5", "stages_per_rank": "2", "zero": "3",
                  "dp": "2"},
        schedule="interleaved_zb", start=(("unsharded_stages", "1"),),
    ),
    "a-hang": Challenge(
        "A hang to mend",
        "These ranks wait for each other, and the job hangs. Find the mistake in the code.",
        "How many forwards does rank 0 need before its first backward can come back?",
        33, 33, _FULL | {"memory_limit": "4GB"}, code=_HANG, includes_split_backwards=False,
    ),
}  # fmt: skip


def describe_challenges() -> list[dict[str, Any]]:
    """Return the data that the page needs about each challenge."""
    return [
        {
            "name": name,
            "title": challenge.title,
            "text": challenge.text,
            "hint": challenge.hint,
            "goal": challenge.goal,
            "state": challenge.make_state(name),
        }
        for name, challenge in CHALLENGES.items()
    ]


def judge(request: Request, state: StudioState) -> dict[str, Any] | None:
    """Return whether a request solves the challenge of `state`, and a sentence about it.

    The result is None if `state` has no challenge.

    Args:
        request: The request of a program that finishes.
        state: The input of the studio, from which the request was made.

    Raises:
        UsageError: There is no such challenge.
    """
    if not state.challenge:
        return None
    if state.challenge not in CHALLENGES:
        raise UsageError(f"no challenge {state.challenge!r}", fields=["challenge"])
    challenge = CHALLENGES[state.challenge]
    changed = find_changed_options(challenge, request)
    span = request.timeline.span
    if changed:
        text = f"The challenge needs other values: {', '.join(changed)}."
        return {"is_solved": False, "text": text}
    if span > challenge.goal * (1 + RELATIVE_TOLERANCE):
        return {"is_solved": False, "text": f"Not yet: the span is {span:.6g}, the goal is "
                f"{challenge.goal:g}."}  # fmt: skip
    kind = "" if challenge.includes_split_backwards else " with full backwards"
    proof = f"no schedule{kind} within this memory is shorter than {challenge.bound:g}"
    optimal = abs(span / challenge.bound - 1) <= RELATIVE_TOLERANCE
    verdict = f"; your schedule is optimal, because {proof}" if optimal else f"; {proof}"
    return {"is_solved": True, "text": f"Solved: the span is {span:.6g}{verdict}."}


def find_changed_options(challenge: Challenge, request: Request) -> list[str]:
    """Return the required options that a request does not keep, each with its required value.

    Args:
        challenge: The challenge.
        request: The request.
    """
    required = make_state_request(StudioState(options=challenge.options), request.source)
    shape, program = request.timeline.program.shape, request.timeline.program
    actual: dict[str, Any] = {
        "ranks": str(shape.ranks),
        "microbatches": str(shape.microbatches),
        "stages_per_rank": str(shape.stages_per_rank),
        "placement": shape.placement,
        "zero": str(program.zero),
        "dp": str(program.dp),
    }
    changed = [
        f"{name}={text}"
        for name, text in challenge.options.items()
        if name in actual and actual[name] != text
    ]
    for name in ("costs", "sizes", "memory_limit"):
        if name in challenge.options and getattr(request, name) != getattr(required, name):
            changed.append(f"{name} {challenge.options[name]}")
    return changed
