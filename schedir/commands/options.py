"""Options of the command line by which schedules are compiled, and what they make of a source."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from schedir.errors import UsageError
from schedir.ir.numerals import decimal, whole

# Imported where needed: --help must not wait for numpy.
if TYPE_CHECKING:
    from schedir.analysis.graph import Model
    from schedir.ir.costs import Costs
    from schedir.ir.plan import Plan
    from schedir.ir.program import Program
    from schedir.ir.sizes import Sizes
    from schedir.ir.ties import Tied
    from schedir.predict.timeline import Timeline
    from schedir.schedules.words import Schedule

SOURCE = (
    "a built-in schedule or file.py:function, with options in brackets if it has any "
    "(interleaved(group=4)), or a program FILE.sched, or a run FILE.timeline"
)
RANKS, PER_RANK = 4, 2  # ranks, and microbatches per rank, unless told


def add_shape(parser: argparse.ArgumentParser) -> None:
    """The options by which a schedule is compiled; None where a FILE.sched may say it."""
    group = parser.add_argument_group("how a schedule is compiled; a FILE.sched has its shape")
    group.add_argument("--ranks", type=count, metavar="N", help=f"pipeline ranks ({RANKS})")
    group.add_argument("--microbatches", type=count, metavar="N", help=f"{PER_RANK} per rank")
    group.add_argument("--stages-per-rank", type=count, metavar="N",
                       help="1, or 2 for a schedule with a parameter v")  # fmt: skip
    group.add_argument(
        "--placement",
        type=_placement,
        metavar="WHERE",
        help="loop, vee, mirror, or ranks like 0,1,1,0",
    )
    group.add_argument("--updates", type=count, metavar="N", help="updates without a flush (1)")
    group.add_argument(
        "--delay", type=_delay, metavar="N", help="updates by which weights are old; or 2,1,0"
    )
    _lowering(group)


def add_lowering(parser: argparse.ArgumentParser) -> None:
    """The options by which a draft is lowered, for sources that have their shape."""
    _lowering(parser.add_argument_group("how it is lowered"))


def _lowering(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--tp", type=_size, metavar="N", help="tensor-parallel ranks (1)")
    group.add_argument("--dp", type=_size, metavar="N", help="data-parallel replicas (1)")
    tied = group.add_mutually_exclusive_group()
    tied.add_argument("--tied", action="store_true", default=None, help="a tied embedding")
    tied.add_argument(
        "--ties",
        dest="tied",
        type=_ties,
        metavar="STAGES",
        help="stages that share weights: 0=2,1=3",
    )
    group.add_argument("--clip", action="store_true", default=None, help="clipped gradients")
    group.add_argument(
        "--overlap",
        action="store_true",
        help="group opposite transfers, begin gathers and post receives early",
    )
    group.add_argument("--model", metavar="MODEL", help="edge, pair, device (default) or serial")
    group.add_argument("--costs", metavar="COSTS", help="F=1,B=2,send=0.1; F=1:1:2 per stage")
    group.add_argument(
        "--slots", metavar="HOW", help="share static buffers: fewest, or enough to lose no time"
    )
    group.add_argument(
        "--sizes", metavar="SIZES", help="activation=16MB,saved=1.2GB; saved=1GB:2GB per stage"
    )
    group.add_argument(
        "--limit", type=_bytes, metavar="BYTES", help="what a rank may hold, like 40GB or 40GiB"
    )


def count(text: str) -> int:
    """A whole number, as an option takes it."""
    try:
        return whole(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _ties(text: str) -> Tied:
    from schedir.ir.ties import read_tied

    found = read_tied(text)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"stages that share weights are like 0=2,1=3, not {text!r}"
        )
    return found


def _size(text: str) -> int:
    if not 1 <= (size := count(text)) <= 65535:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 to 65535, not {text!r}")
    return size


def _bytes(text: str) -> float:
    from schedir.ir.sizes import bytes_of

    try:
        return bytes_of(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be bytes, like 40GB, not {text!r}") from None


def _placement(text: str) -> str | tuple[int, ...]:
    try:
        return tuple(map(whole, text.split(",")))
    except ValueError:
        return text  # a name


def _delay(text: str) -> int | tuple[int, ...]:
    try:
        return tuple(map(whole, text.split(","))) if "," in text else whole(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be a whole number, or one per stage like 2,1,0, not {text!r}"
        ) from None


def costs_of(text: str | None) -> Costs:
    """`F=1,B=2,send=0.1`, or `F=1:1:2` for one per stage."""
    from schedir.ir.costs import Costs

    return Costs(**_numbers("cost", Costs, text, decimal, "F=1"))


def sizes_of(args: argparse.Namespace, share: Plan | None = None) -> Sizes | None:
    """`activation=16MB,saved=1.2GB`, or `saved=1GB:1GB:2GB` for one per stage.

    With `share` they are those of a whole rank, and are shared out to its stages.
    """
    from schedir.ir.sizes import Sizes, bytes_of

    if args.sizes is None:
        return None
    sizes = Sizes(**_numbers("size", Sizes, args.sizes, bytes_of, "saved=1GB"))
    return _shared(sizes, share) if share else sizes


def _numbers(
    what: str, kind: type[Costs | Sizes], text: str | None, number: Callable[[str], float], say: str
) -> dict[str, Any]:
    """What `name=number,name=number:number` gives for the fields of a class."""
    from dataclasses import fields
    from difflib import get_close_matches

    names = [f.name for f in fields(kind)]
    given: dict[str, Any] = {}
    for part in text.split(",") if text else ():
        name, equals, value = part.partition("=")
        name = name.strip()
        if name not in names:
            near = get_close_matches(name, names, 1)
            raise UsageError(
                f"--{what}s: no {what} {name!r}",
                hint=f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}",
            )
        if name in given:
            raise UsageError(f"--{what}s: {name} is given twice")
        try:
            given[name] = tuple(map(number, value.split(":"))) if ":" in value else number(value)
        except ValueError:
            said = f"{value!r}" if equals else "nothing"
            one = say.partition("=")[2]
            raise UsageError(
                f"--{what}s: {name} must be a number or one per stage, not {said}",
                hint=f"{name}={one} or {name}={one}:{one}:{one}",
            ) from None
    return given


def model_of(args: argparse.Namespace, program: Program) -> Model:
    """The progress model that is told, else device, or of a run's program that of the run."""
    from schedir.analysis.graph import MODELS

    told: Model | None = args.model
    proven = {model for model, _ in program.proofs}
    own = [model for model in MODELS if model in proven]
    return told or ("device" if not own or "device" in own else own[0])


def program_of(
    args: argparse.Namespace, source: str, *, share: bool = False
) -> tuple[Program, Costs]:
    """The Program that a source names, and its costs.

    A schedule is compiled and so checked; a file is taken as it is, of a run its program.  `share`
    is for comparing schedules of one model: a rank's costs are split evenly over its stages, and
    only schedules that take `v`, or are for several, have several.
    """
    from schedir.analysis.graph import known
    from schedir.io.load import load
    from schedir.ir.program import Program
    from schedir.passes.compile import compile, within
    from schedir.schedules.draft import draft
    from schedir.verify.check import check

    known(args.model or "device")
    costs, found = costs_of(args.costs), load(source)
    if isinstance(found, Program):
        _agree(args, found, source, but=("stages_per_rank", "placement") if share else ())
        if args.limit is not None:
            sizes = sizes_of(args, found.plan if share else None)
            within(check(found, model_of(args, found)), sizes, args.limit)
        return found, _shared(costs, found.plan) if share else costs
    plan = _plan(args, found, share=share)
    if getattr(args, "draft", False):
        return draft(found, plan), costs
    costs = _shared(costs, plan) if share else costs
    program = compile(
        found,
        plan,
        args.tp or 1,
        args.dp or 1,
        args.model or "device",
        costs,
        tied=args.tied or False,
        clip=bool(args.clip),
        overlap=args.overlap,
        slots=args.slots,
        sizes=sizes_of(args, plan if share else None),
        limit=args.limit,
    )
    return program, costs


def _plan(args: argparse.Namespace, schedule: Schedule, *, share: bool) -> Plan:
    from schedir.ir.plan import Plan
    from schedir.schedules.words import delay_for, placed_for, stages_per_rank_for, takes_v

    ranks = RANKS if args.ranks is None else args.ranks
    microbatches = PER_RANK * ranks if args.microbatches is None else args.microbatches
    mark, fixed = placed_for(schedule)
    placement = args.placement or mark or "loop"
    v = args.stages_per_rank
    if v is None or (share and (fixed or (placement == "loop" and not takes_v(schedule)))):
        v = stages_per_rank_for(schedule) if isinstance(placement, str) else 1  # as a map says
    updates = 1 if args.updates is None else args.updates
    delay = args.delay
    if delay is None:
        delay = delay_for(schedule) or 0 if updates > 1 else 0
    return Plan(ranks, microbatches, v, placement, updates, delay)


_Each = TypeVar("_Each", "Costs", "Sizes")


def _shared(each: _Each, plan: Plan) -> _Each:
    """Costs or sizes of a microbatch on a rank as those on one of its stages."""
    from dataclasses import replace

    names = ["F", "B", "I", "W", "FB", "reduce_grads", "reduce_holders"]
    names += ["saved", "tape", "both", "weights", "version"]
    whole = {name: getattr(each, name, None) for name in names}
    part = plan.ranks / plan.stages
    return replace(each, **{k: c * part for k, c in whole.items() if isinstance(c, float)})


def _agree(
    args: argparse.Namespace, program: Program, source: str, but: Sequence[str] = ()
) -> None:
    """Refuse options that contradict the shape that a file has."""
    from schedir.ir.ties import show_tied, tied_stages

    for name in ("ranks", "microbatches", "stages_per_rank", "placement", "updates", "delay",
                 "tp", "dp", "tied", "clip"):  # fmt: skip
        said = getattr(args, name)
        has = getattr(program if hasattr(program, name) else program.plan, name)
        if name == "tied" and said is not None:
            said = tied_stages(said, program.plan)
        if name not in but and said is not None and said != has:
            option = "--" + name.replace("_", "-")
            if name == "tied":
                option, has, said = "--tied", *(show_tied(t, program.plan) for t in (has, said))
            raise UsageError(f"{source} has {name} {has}, not {said}", hint=f"leave out {option}")
    for name in ("draft", "overlap", "slots"):
        if getattr(args, name, False):
            raise UsageError(f"{source} is a program: --{name} is for schedules")


def timeline_of(args: argparse.Namespace, source: str, *, share: bool = False) -> Timeline:
    """The predicted run of what a source names, or the run in a file; a program is checked."""
    from schedir.predict.simulate import simulate

    if source.endswith(".timeline"):
        return _timeline(args, source, share=share)
    program, costs = program_of(args, source, share=share)
    model: Model = args.model or "device"
    return simulate(
        program, costs, model=model, sizes=sizes_of(args, program.plan if share else None)
    )


def _timeline(args: argparse.Namespace, source: str, *, share: bool) -> Timeline:
    """The run in a file, or with --costs the prediction of its program, in the same unit.

    Options that would say otherwise are refused.
    """
    from dataclasses import replace

    from schedir.io.timeline_file import load_timeline
    from schedir.passes.compile import within
    from schedir.predict.simulate import simulate

    found = load_timeline(source)
    if args.model not in (None, found.model) and not share:
        raise UsageError(f"{source} ran under {found.model}, not {args.model}")
    _agree(args, found.program, source, but=("stages_per_rank", "placement") if share else ())
    sizes = sizes_of(args, found.program.plan if share else None) or found.sizes
    if args.limit is not None:
        within(found.program, sizes, args.limit)
    if args.costs is not None and not share:
        model, blocks = found.model, found.blocks
        predicted = simulate(found.program, costs_of(args.costs), model=model, blocks=blocks)
        found = replace(predicted, unit=found.unit)
    return replace(found, sizes=sizes)
