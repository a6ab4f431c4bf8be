"""Compare schedule search with published schedules, certified optima, CP-SAT and its own bound.

    python benchmarks/search.py                           # all tables
    python benchmarks/search.py table5 [--seconds 6]      # arXiv 2401.10241, table 5 from table 9
    python benchmarks/search.py uneven [--seconds 4]      # stages with different costs
    python benchmarks/search.py time [--seconds 10]       # with numba, if it is installed
    NUMBA_DISABLE_JIT=1 python benchmarks/search.py time  # without numba
    python benchmarks/search.py certified [--seconds 2] [--cells 72] [--every 10]
    python benchmarks/search.py below [--seconds 10]      # compared with CP-SAT (60 s)
    python benchmarks/search.py below --certify           # runs CP-SAT for 60 s per case
    python benchmarks/search.py certify --seeds 0:200 [--seconds 6] [--add]

The script measures the lengths of found schedules and the times of searches. It prints each row of
a table as soon as it is measured. Seconds are processor time. Only columns with "clock" are wall
time, which needs an idle machine.

- `certified`: searches the cases of tests/certified_optima.csv. The excess is the length of the
  found order over the optimum. Both are lengths without message queues. The last column counts the
  cases in which a simulation takes longer, because it has queues. Seconds are those of the search
  alone.
- `below`: searches 20 cases of 72 to 192 (stage, microbatch) pairs, with memory for fewer
  microbatches than ranks. CP-SAT gets no hint and no bound. docs/results/search-below.csv has its
  results.
- `certify`: draws cases, runs CP-SAT, and keeps the cases whose optimum CP-SAT proves. The seed
  alone determines a case. Cases have 2 to 8 ranks, one or several stages per rank in loops and
  vees, and even or uneven costs. Memory limits are counts or bytes below, at and above the number
  of ranks. The script prints the cases as lines of tests/certified_optima.csv, or appends them.

CP-SAT is the solver of `ortools`, which `pip install 'schedir[solver]'` installs.
"""

from __future__ import annotations

import argparse
import csv
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from importlib.metadata import version
from importlib.util import find_spec
from math import ceil, inf
from pathlib import Path
from time import perf_counter, process_time
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import schedir
from benchmarks.harness import parse, print_header, print_row, report_missing
from schedir import Costs, PipelineShape
from schedir.analysis import numba_jit
from schedir.errors import MemoryLimitError, SchedirError, UsageError
from schedir.ir.isa.instructions import BACKWARD, FORWARD
from schedir.schedule_search.cp_sat import PROOF_TOLERANCE, solve
from schedir.schedule_search.problem import Objective, SchedulingProblem
from schedir.schedule_search.rank_order import (
    Order,
    compute_length,
    compute_peaks,
    order_of_program,
)
from schedir.schedule_search.search_results import SearchStep
from schedir.schedules import get_built_in_schedules
from schedir.schedules.schedule_algebra import get_placement_mark
from schedir.schedules.schedule_expansion import expand_schedule
from tests.certified_optima import FILE, Case, Row, load_cases, read_cases
from tests.laws import ZOO
from tests.zero_bubble_figures import PRINTED, read_rows

Options = argparse.Namespace
COST_DRAWS = 5  # number of draws of random costs
SHAPES = [(4, 16), (4, 64), (8, 24), (8, 64), (16, 48), (16, 128)]
BELOW_FILE = Path(__file__).parents[1] / "docs" / "results" / "search-below.csv"
BELOW_SHAPES = [(6, 12, 3), (8, 16, 4), (8, 16, 6), (8, 24, 4), (8, 24, 6)]  # ranks, m, in flight
# Stages per rank -> the largest number of (stage, microbatch) pairs of a drawn case.
MAX_CELLS = {1: 130, 2: 64, 3: 36}


def print_table5(options: Options) -> None:
    """Print the bubble rates of the longest active span, with the memory limits of the paper."""
    print_header("model", "p", "m", "limit", "paper", "found", "bound", "", "stopped", "s")
    for row in read_rows()[:1] if options.smoke else read_rows():
        for limit, column in ((1, "rate_ZB_1p"), (2, "rate_ZB_2p")):
            start = process_time()
            search_result = schedir.search_schedule(
                row.shape, row.costs, row.sizes, limit * row.shape.ranks,
                objective="active_span", time_limit=options.seconds,
            )  # fmt: skip
            seconds = process_time() - start
            paper, rate = row.rates[column], row.rate(search_result.span)
            verdict = "better" if rate < paper - PRINTED / 2 else "equal"
            verdict = "worse" if rate > paper + PRINTED / 2 else verdict
            print_row(
                row.model,
                row.shape.ranks,
                row.shape.microbatches,
                f"{limit}p",
                f"{paper:.2%}",
                f"{rate:.3%}",
                f"{row.rate(search_result.bound):.3%}",
                verdict,
                search_result.stop_reason,
                f"{seconds:.1f}",
            )


def list_uneven_costs(ranks: int) -> Iterator[tuple[str, Costs]]:
    """Yield costs that differ between stages."""
    last_slow = (1.0,) * (ranks - 1) + (1.5,)
    yield "last x 1.5", Costs(F=last_slow, I=last_slow, W=last_slow)
    for seed in range(COST_DRAWS):
        rng = random.Random(seed)
        F, I, W = (tuple(rng.uniform(0.7, 1.3) for _ in range(ranks)) for _ in range(3))
        yield f"0.7 to 1.3, {seed}", Costs(F=F, I=I, W=W)


def find_shortest_span(shape: PipelineShape, costs: Costs, max_in_flight: int) -> float:
    """Return the shortest span of the built-in schedules that fit into a limit of activations."""
    spans = []
    for schedule in get_built_in_schedules().values():
        try:
            run = schedir.simulate(schedir.compile(schedule, shape, costs=costs), costs)
        except (MemoryLimitError, SchedirError):  # the schedule does not support this shape
            continue
        if (
            run.program.has_backward
            and run.program.shape == shape
            and run.peak_in_flight.max() <= max_in_flight
        ):
            spans.append(run.span)
    return min(spans)


def print_uneven(options: Options) -> None:
    """Print the gap to the bound of the best built-in schedule and of the found order."""
    print_header("p x m", "in flight", "costs", "recommend of the zoo", "found", "stopped", "s")
    search_gaps, built_in_gaps = [], []
    for p, m in SHAPES[:1] if options.smoke else SHAPES:
        for max_in_flight in (p, p * 3 // 2):
            for name, costs in list_uneven_costs(p):
                shape = PipelineShape(p, m)
                start = process_time()
                search_result = schedir.search_schedule(
                    shape, costs, max_in_flight=max_in_flight, time_limit=options.seconds
                )
                seconds = process_time() - start
                search_gaps.append(search_result.gap_to_bound)
                built_in_gaps.append(
                    find_shortest_span(shape, costs, max_in_flight) / search_result.bound - 1
                )
                print_row(
                    f"{p} x {m}",
                    max_in_flight,
                    name,
                    f"{built_in_gaps[-1]:.2%}",
                    f"{search_result.gap_to_bound:.2%}",
                    search_result.stop_reason,
                    f"{seconds:.1f}",
                )
    for name, gaps in (("zoo", built_in_gaps), ("found", search_gaps)):
        print(f"{name}: {sum(gaps) / len(gaps):.2%} in the mean, {max(gaps):.2%} at worst")


def print_times(options: Options) -> None:
    """Print the times of a bound and a proof, and the times until a first and a close order."""
    try:
        numba_jit.enable_numba()
    except UsageError:
        print("numba: no\n")
    else:
        print("numba: yes\n")
    print_header("what", "p x m", "processor s", "clock s", "over the bound")
    paper_costs = Costs(F=18.522, I=18.086, W=9.337, send=0.601)
    uneven_costs = dict(list_uneven_costs(16))["0.7 to 1.3, 0"]
    for p, m in ((8, 24),) if options.smoke else ((8, 24), (16, 128), (32, 256)):
        times = []
        for _ in range(3):
            cpu_start = process_time()
            schedir.lower_bound(PipelineShape(p, m), paper_costs, max_in_flight=p)
            times.append(process_time() - cpu_start)
        print_row("bound, the best of three", f"{p} x {m}", f"{min(times):.4f}", "", "")
    searches = (
        ("search, even", 8, 24, paper_costs),
        ("search, 0.7 to 1.3", 16, 128, uneven_costs),
        ("search, even", 32, 256, paper_costs),
        ("search, 0.7 to 1.3", 32, 256, dict(list_uneven_costs(32))["0.7 to 1.3, 0"]),
    )
    for description, p, m, costs in searches[:1] if options.smoke else searches:
        cpu_start, wall_start = process_time(), perf_counter()
        improvements: list[tuple[float, float]] = []
        search_result = schedir.search_schedule(
            PipelineShape(p, m),
            costs,
            max_in_flight=p,
            time_limit=options.seconds,
            report=lambda step, bound, improvements=improvements, cpu_start=cpu_start: (
                improvements.append(  # type: ignore[misc]
                    (process_time() - cpu_start, step.span / bound - 1)
                )
            ),
        )
        cpu_seconds, wall_seconds = process_time() - cpu_start, perf_counter() - wall_start
        print_row(
            f"{description}: {search_result.stop_reason}",
            f"{p} x {m}",
            f"{cpu_seconds:.2f}",
            f"{wall_seconds:.2f}",
            f"{search_result.gap_to_bound:.2%}",
        )
        if improvements:  # empty if the time limit ended the search before its first schedule
            print_row(
                "its first schedule",
                f"{p} x {m}",
                f"{improvements[0][0]:.2f}",
                "",
                f"{improvements[0][1]:.2%}",
            )
        improvements_within_1_percent = [
            improvement for improvement in improvements if improvement[1] <= 0.01
        ]
        if improvements_within_1_percent:
            print_row(
                "within 1 %",
                f"{p} x {m}",
                f"{improvements_within_1_percent[0][0]:.2f}",
                "",
                f"{improvements_within_1_percent[0][1]:.2%}",
            )
    shape, costs = PipelineShape(16, 64), dict(list_uneven_costs(16))["0.7 to 1.3, 0"]
    for time_limit in (0.1,) if options.smoke else (1.0, 3.0):
        wall_start = perf_counter()
        schedir.search_schedule(shape, costs, max_in_flight=16, time_limit=time_limit)
        print_row(
            f"--seconds {time_limit:g}", "16 x 64", "", f"{perf_counter() - wall_start:.2f}", ""
        )


# ------------------------------------------------------------ compared with certified optima


class Result(NamedTuple):
    case: Case
    excess: float
    slack: float  # relative difference of the bound from the optimum
    queued: bool
    seconds: float
    method: str


def search_case(case: Case, seconds: float) -> Result:
    """Return the result of a search. If its bound is above the optimum, the script ends."""
    start = process_time()
    search_result = schedir.search_schedule(
        case.shape, case.costs, case.sizes, case.limit,
        max_in_flight=case.in_flight, objective=case.objective, split_backward=case.split,
        time_limit=seconds,
    )  # fmt: skip
    cpu_seconds = process_time() - start
    # There are no improvements if the time limit ended the search before it found an order.
    last_step = (
        search_result.improvements[-1]
        if search_result.improvements
        else SearchStep(cpu_seconds, "none", search_result.span)
    )
    found_span = last_step.span
    assert found_span >= case.optimum * (1 - PROOF_TOLERANCE), case
    assert search_result.bound <= case.optimum * (1 + PROOF_TOLERANCE), case
    queued = search_result.span > found_span * (1 + PROOF_TOLERANCE)
    slack = 1 - search_result.bound / case.optimum
    return Result(case, found_span / case.optimum - 1, slack, queued, cpu_seconds, last_step.method)


def list_groups(case: Case) -> Iterator[str]:
    yield "all"
    yield "S*m <= 72" if case.cells <= 72 else "S*m > 72"
    yield "below p activations" if case.tight else "p or more"
    yield "one stage per rank" if case.stages_per_rank == 1 else "several stages per rank"
    yield "I and W" if case.split else "whole B"
    yield case.objective
    yield "in bytes" if case.limit is not None else "in counts"


def format_summary(results: list[Result]) -> Iterator[str]:
    by_group: dict[str, list[Result]] = {}
    for result in results:
        for group in list_groups(result.case):
            by_group.setdefault(group, []).append(result)
    yield "| cases | n | optimal | worst excess | bound exact | mean slack | s | queues |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for group, group_results in by_group.items():
        n = len(group_results)
        yield (
            f"| {group} | {n} | {sum(r.excess <= PROOF_TOLERANCE for r in group_results)} "
            f"| {max(r.excess for r in group_results):.2%} | "
            f"{sum(r.slack <= PROOF_TOLERANCE for r in group_results)} "
            f"| {sum(r.slack for r in group_results) / n:.2%} | "
            f"{sum(r.seconds for r in group_results) / n:.2f} "
            f"| {sum(r.queued for r in group_results)} |"
        )


def print_certified(options: Options) -> None:
    """Print the share of optimal searches, and the errors of the order and of the bound."""
    results = []
    for case in [c for c in load_cases() if c.cells <= options.cells][:: options.every]:
        results.append(search_case(case, options.seconds))
        if results[-1].excess > PROOF_TOLERANCE:
            print(f"{results[-1].excess:.3%} over: {case}, {results[-1].method}", flush=True)
    print("\n".join(format_summary(results)))


# ------------------------------------------------------------ below p activations, with CP-SAT


def list_below_costs(ranks: int) -> Iterator[tuple[str, Row, Row, Row, float]]:
    """Return even costs, costs of arXiv 2401.10241, table 9, and uneven costs."""
    last_slow = (1.0,) * (ranks - 1) + (1.5,)
    rng = random.Random(ranks)
    yield "unit", (1.0,), (1.0,), (1.0,), 0.0
    yield "1.5B", (18.522,), (18.086,), (9.337,), 0.601
    yield "last stage x 1.5", last_slow, last_slow, last_slow, 0.0
    costs = (tuple(round(rng.uniform(0.7, 1.3), 3) for _ in range(ranks)) for _ in range(3))
    yield "0.7 to 1.3", *costs, 0.0  # type: ignore[misc]


def write_solver_results(
    path: Path, seconds: float, shapes: Sequence[tuple[int, int, int]]
) -> None:
    """Write the results of CP-SAT for each case to a file."""
    names = [*(f.name for f in fields(Case)), "bound", "costs"]
    with path.open("w", newline="") as file:
        file.write(
            f"# benchmarks/search.py below --certify, CP-SAT {version('ortools')}, {seconds} s\n"
        )
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        for ranks, microbatches, max_in_flight in shapes:
            for name, forward, backward, weight, send in list_below_costs(ranks):
                case = Case(
                    ranks, microbatches, 1, "loop", True, "span", forward, backward, weight, send,
                    max_in_flight, None, None, None, None, 0.0, None, "",
                )  # fmt: skip
                solved = solve(case.problem, seconds, workers=2)
                print(case, name, solved.value, solved.bound.value, flush=True)
                row = replace(case, optimum=solved.value).line()
                writer.writerow(row | {"bound": solved.bound.value, "costs": name})
                file.flush()


def print_solver_comparison(path: Path, seconds: float) -> None:
    """Print the results of a search next to the results of CP-SAT, which are read from a file."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    print_header(
        "p x m", "in flight", "costs", "CP-SAT", "its bound", "search", "over CP-SAT", "bound", "s"
    )
    differences = []
    for case, row in zip(read_cases(path), rows, strict=True):
        start = process_time()
        search_result = schedir.search_schedule(
            case.shape, case.costs, max_in_flight=case.in_flight, time_limit=seconds
        )
        cpu_seconds = process_time() - start
        # There are no improvements if the time limit ended the search before it found an order.
        found_span = (
            search_result.improvements[-1].span
            if search_result.improvements
            else search_result.span
        )
        differences.append(found_span / case.optimum - 1)
        print_row(
            f"{case.ranks} x {case.microbatches}",
            case.in_flight,
            row["costs"],
            f"{case.optimum:.6g}",
            f"{float(row['bound']):.6g}",
            f"{found_span:.6g}",
            f"{differences[-1]:+.2%}",
            f"{search_result.bound:.6g}",
            f"{cpu_seconds:.1f}",
        )
    print(f"\nmean {sum(differences) / len(differences):+.2%}, at most {max(differences):+.2%}")


def print_below(options: Options) -> None:
    """Search with a limit below p activations, or write the results of CP-SAT for these cases."""
    if options.smoke:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, BELOW_FILE.name)
            write_solver_results(path, 0.5, BELOW_SHAPES[:1])
            print_solver_comparison(path, options.seconds)
    elif options.certify:
        write_solver_results(BELOW_FILE, 60.0, BELOW_SHAPES)
    else:
        print_solver_comparison(BELOW_FILE, options.seconds)


# ------------------------------------------------------------ new certified optima


def draw_case(seed: int) -> Case:
    """Return the case of a seed, without its optimum."""
    rng = random.Random(seed)
    v = rng.choices((1, 2, 3), (7, 3, 1))[0]
    ranks = rng.randint(2, 8 if v == 1 else 4)
    max_microbatches = min(24, MAX_CELLS[v] // (ranks * v))
    microbatches = rng.randint(min(2, max_microbatches), max_microbatches)
    placement = rng.choice(("loop", "vee")) if v == 2 else "loop"
    stages, split = ranks * v, rng.random() < 0.75
    forward, backward, weight, send = _draw_costs(rng, stages)
    if not split:
        backward, weight = (
            tuple(round(sum(halves), 15) for halves in zip(backward, weight, strict=True)),
            (0.0,),
        )
    objectives: tuple[Objective, ...] = ("span", "active_span")
    objective = rng.choices(objectives, (3, 1))[0]
    case = Case(
        ranks, microbatches, v, placement, split, objective, forward, backward, weight, send,
        None, None, None, None, None, 0.0, None, "",
    )  # fmt: skip
    share = rng.choice((0.5, 0.5, 0.6, 0.75, 1, 1, 1.25, 1.5, 2))
    if rng.random() < 0.5:
        return replace(case, in_flight=max(ceil(share * ranks * v), v))
    saved = _draw_row(rng, stages, lambda: float(rng.randint(8, 20)), rng.random() < 0.7)
    part = rng.choice((0.25, 0.4, 0.7, 1.0))
    tape = tuple(float(ceil(part * s)) for s in saved)
    saved_and_tape = tuple(
        s + float(rng.randint(0, int(t))) for s, t in zip(saved, tape, strict=True)
    )
    limit = float(ceil(share * ranks * v * max(saved) + max(tape)))
    return replace(
        case, saved=saved, tape=tape, both=rng.choice((None, saved_and_tape)), limit=limit
    )


def _draw_costs(rng: random.Random, stages: int) -> tuple[Row, Row, Row, float]:
    kind = rng.choice(("even", "last", "whole", "decimal", "real"))
    if kind in ("even", "last"):
        stage_costs = rng.choice(
            ((1.0, 1.0, 1.0), (3.0, 3.0, 2.0), (18.522, 18.086, 9.337), (2.0, 3.0, 1.0))
        )
        factor = [1.0] * (stages - 1) + [1.5 if kind == "last" else 1.0]
        rows = [tuple(round(c * f, 6) for f in factor) for c in stage_costs]
    elif kind == "whole":
        rows = [tuple(float(rng.randint(1, 9)) for _ in range(stages)) for _ in range(3)]
    else:
        digits = 2 if kind == "decimal" else 15
        rows = [
            tuple(round(c * rng.uniform(0.7, 1.3), digits) for _ in range(stages))
            for c in (1.0, 1.0, rng.choice((0.5, 1.0)))
        ]
    send = rng.choice((0.0, round(rng.uniform(0.01, 0.3) * min(rows[0]), 3)))
    return (*(row[:1] if len(set(row)) == 1 else row for row in rows), send)  # type: ignore[return-value]


def _draw_row(rng: random.Random, stages: int, draw_value: object, is_even: bool) -> Row:
    assert callable(draw_value)
    return (draw_value(),) if is_even else tuple(draw_value() for _ in range(stages))


def list_built_in_orders(problem: SchedulingProblem) -> Iterator[tuple[str, Order]]:
    """Yield the names and orders of built-in schedules for a shape.

    If the problem splits backwards, the orders split all backwards.
    """
    shape = problem.shape
    for name, schedule in ZOO.items():
        placement, per_rank = get_placement_mark(schedule)
        if placement not in (None, shape.placement) or per_rank not in (
            None,
            shape.stages_per_rank,
        ):
            continue
        try:
            program = expand_schedule(schedule, shape)
        except SchedirError:
            continue
        if not problem.split_backward and any(
            {*stream.op} - {FORWARD, BACKWARD} for stream in program.streams
        ):
            continue
        order = order_of_program(program, split_backward=problem.split_backward)
        codes_per_stage = problem.microbatches * (2 + problem.split_backward)
        if all(
            len(codes) == len(rank_stages) * codes_per_stage
            for codes, rank_stages in zip(order, problem.stages_of_rank, strict=True)
        ):
            yield name, order


def find_shortest_order(problem: SchedulingProblem) -> tuple[float | None, str]:
    """Return the length and the name of the shortest built-in order that fits into memory."""
    best_length, best_name = inf, ""
    for name, order in list_built_in_orders(problem):
        length = compute_length(problem, order)
        if length is None or length >= best_length:
            continue
        if all(
            problem.fits_on_rank(peak, rank)
            for rank, peak in enumerate(compute_peaks(problem, order))
        ):
            best_length, best_name = length, name
    return (best_length, best_name) if best_name else (None, "")


def certify(options: Options) -> None:
    """Draw cases, and write the cases whose optimum CP-SAT proves."""
    names = [f.name for f in fields(Case)]
    file = FILE.open("a", newline="") if options.add else sys.stdout
    writer = csv.DictWriter(file, names, lineterminator="\n")
    if not options.add or not FILE.stat().st_size:
        file.write(f"# benchmarks/search.py certify, CP-SAT {version('ortools')}\n")
        writer.writeheader()
    for seed in range(*map(int, options.seeds.split(":"))):
        case = draw_case(seed)
        try:
            problem = case.problem
        except SchedirError:  # the memory limit of the case is too small
            continue
        start = perf_counter()
        solved = solve(problem, options.seconds, workers=2)
        seconds = perf_counter() - start
        print(
            f"{seed} {case}: {solved.value:.6g} {solved.is_proved} {seconds:.1f} s", file=sys.stderr
        )
        if solved.is_proved:
            built_in_length, name = find_shortest_order(problem)
            writer.writerow(
                replace(case, optimum=solved.value, zoo=built_in_length, schedule=name).line()
            )
            file.flush()


TABLES: dict[str, tuple[Callable[[Options], None], float]] = {
    "table5": (print_table5, 6.0), "uneven": (print_uneven, 4.0), "time": (print_times, 10.0),
    "certified": (print_certified, 2.0), "below": (print_below, 10.0), "certify": (certify, 6.0),
}  # fmt: skip
DRAWS_CASES = "certify"  # this command draws cases and prints no table, so `all` does not run it


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("table", nargs="?", default="all", choices=("all", *TABLES))
    parser.add_argument(
        "--seconds", type=float, help="limit of each search, or of CP-SAT in `certify`"
    )
    parser.add_argument(
        "--cells", type=int, default=10**6, help="`certified`: only cases with at most this S*m"
    )
    parser.add_argument("--every", type=int, default=1, help="`certified`: only each n-th case")
    parser.add_argument("--certify", action="store_true", help="`below`: run CP-SAT, 60 s per case")
    parser.add_argument("--seeds", default="0:60", help="`certify`: seeds, as from:to")
    parser.add_argument("--add", action="store_true", help=f"`certify`: add to {FILE.name}")
    options = parse(parser, seconds=0.1, every=100, seeds="2:4")
    default_tables = [name for name in TABLES if name != DRAWS_CASES or options.smoke]
    names, code = default_tables if options.table == "all" else [options.table], 0
    for name in names:
        needs_solver = name == DRAWS_CASES or (
            name == "below" and (options.certify or options.smoke)
        )
        if needs_solver and find_spec("ortools") is None:
            code = report_missing("needs ortools: pip install 'schedir[solver]'", options.smoke)
            continue
        table, seconds = TABLES[name]
        time_limit = seconds if options.seconds is None else options.seconds
        table(argparse.Namespace(**{**vars(options), "seconds": time_limit}))
    return code


if __name__ == "__main__":
    sys.exit(main())
