"""The studio without a browser: answers, edits, exports, code, and the requests it refuses."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterator
from threading import Timer
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedir.commands.common.schedule_options import (
    add_compile_options,
    add_source,
    make_request,
    parse_costs,
)
from schedir.commands.studio import DEFAULTS, MAX_INSTRUCTIONS, read_options
from schedir.commands.studio.answers import Studio
from schedir.commands.studio.challenges import CHALLENGES
from schedir.commands.studio.code_process import CodeRunner, expand_code
from schedir.commands.studio.state import CodeError, StudioState, format_command
from schedir.compiler.compile import compile
from schedir.compiler.relower import extract_compute
from schedir.io import torch_csv
from schedir.io.source_loader import Source
from schedir.io.timeline_file import save_timeline
from schedir.ir.input_trust import input_limits
from schedir.ir.text_format import from_text
from schedir.predict.simulate import simulate
from schedir.schedule_search.bounds.lower_bound import lower_bound
from schedir.schedules import get_built_in_schedules
from schedir.verify.check import check

STUDIO = Studio()
CODE = """\
from schedir import B, F


def mine(rank, ranks, microbatches):
    warmup = min(ranks - 1 - rank, microbatches)
    return warmup * F + (microbatches - warmup) * (F + B) + warmup * B
"""
BACKWARD_FIRST = "from schedir import B, F\ndef f(r, p, m):\n    return m * B + m * F\n"
HANG = "from schedir import B, F\ndef f(r, p, m):\n    return m * F + m * B if r else m * (F + B)\n"


@pytest.fixture(autouse=True, scope="module")
def limits() -> Iterator[None]:
    """Apply the limits that the command `schedir studio` sets."""
    with input_limits(max_instructions=MAX_INSTRUCTIONS, allow_code=False):
        yield


def make_state(schedule: str = "one_f_one_b", **options: str) -> dict[str, Any]:
    return {"schedule": schedule, "options": DEFAULTS | options}


def ask(question: object, studio: Studio = STUDIO) -> dict[str, Any]:
    """Return the answer to a request, as the page receives it."""
    answer: dict[str, Any] = json.loads(json.dumps(studio.answer(question)))
    return answer


def expand_in_process(state: StudioState) -> str:
    return expand_code(state)


WITH_CODE = Studio(expand_code=expand_in_process)


@settings(max_examples=25)
@given(
    schedule=st.sampled_from(sorted(get_built_in_schedules())),
    ranks=st.integers(1, 5),
    microbatches=st.integers(1, 9),
    cost=st.sampled_from([0.5, 1, 3]),
    options=st.sampled_from(
        [{}, {"zero": "1", "dp": "2"}, {"recompute": "all"}, {"overlap": "yes"}]
    ),
)
def test_answer_matches_simulation(
    schedule: str, ranks: int, microbatches: int, cost: float, options: dict[str, str]
) -> None:
    given_state = make_state(
        schedule, ranks=str(ranks), microbatches=str(microbatches), costs=f"B={cost}", **options
    )
    answer = ask({"state": given_state})
    if "error" in answer:
        assert answer["error"]["fact"]
        return
    [run] = answer["runs"]
    kinds = {"zero": int, "dp": int, "recompute": str, "overlap": bool}
    costs = parse_costs(f"B={cost}")
    program = compile(
        schedule,
        ranks=ranks,
        microbatches=microbatches,
        costs=costs,
        **{name: kinds[name](text) for name, text in options.items()},
    )
    span = simulate(program, costs).span
    assert run["span"] == pytest.approx(span)
    assert run["digest"] == program.digest
    assert answer["bound"] is None or answer["bound"] <= span * (1 + 1e-9)
    assert len(answer["tables"][0]["rows"]) == ranks == answer["ranks"]


@pytest.mark.parametrize(
    "question",
    [
        None, [], "x", {"state": 3}, {"state": {"other": 1}}, {"state": {"options": {"F": 1}}},
        {"state": {"schedule": 4}}, {"state": {"run": True}}, {"state": {"program": "rank"}},
        {"state": {"schedule": "mine.py:f"}}, {"state": {"schedule": "/etc/passwd.sched"}},
        {"state": {"schedule": "x.timeline"}}, {"state": {"schedule": "<b>"}},
        {"state": {"other": "mine.py:f"}}, {"state": {"challenge": "none"}},
        {"state": {"schedule": "interleaved(group=__import__('os'))"}},
        {"state": {"options": {"costs": "@/etc/hostname"}}},
        {"state": {"options": {"ranks": "100000", "microbatches": "100000"}}},
        {"state": {"options": {"ranks": "-1"}}}, {"state": {"options": {"none": "1"}}},
        {"state": {"code": CODE}}, {"state": {}, "move": [0, 0]}, {"state": {}, "move": [9, 0, 0]},
        {"state": {}, "move": [0, "0", 0]}, {"state": {}, "export": "exe"},
        {"state": {}, "export": {}}, {"state": {}, "explain": [0, 10**9]},
    ],
)  # fmt: skip
def test_wrong_request_has_error(question: object) -> None:
    assert ask(question)["error"]["fact"]


@pytest.mark.parametrize(
    ("options", "field"),
    [({"ranks": "x"}, "ranks"), ({"ranks": "257", "microbatches": "4"}, "ranks"),
     ({"zero": "9"}, "zero"), ({"costs": "F=x"}, "costs"),
     ({"memory_limit": "much"}, "memory_limit"), ({"progress_model": "none"}, "progress_model")],
)  # fmt: skip
def test_error_names_its_control(options: dict[str, str], field: str) -> None:
    assert ask({"state": make_state(**options)})["error"]["fields"] == [field]


def test_deadlock_and_illegal_order_are_drawn() -> None:
    illegal = ask({"state": make_state() | {"code": BACKWARD_FIRST}}, WITH_CODE)["error"]
    assert illegal["kind"] == "OrderError"
    assert [site["text"] for site in illegal["sites"]] == ["B 0.0", "F 0.0"]
    hang = ask({"state": make_state() | {"code": HANG}}, WITH_CODE)["error"]
    assert hang["kind"] == "DeadlockError"
    assert all(error["picture"].startswith("<svg") for error in (illegal, hang))


# ---------------------------------------------------------------- edits and exports


@settings(max_examples=25, deadline=None)
@given(
    schedule=st.sampled_from(["gpipe", "one_f_one_b", "zb_h1", "zb_v", "dualpipe_v"]),
    data=st.data(),
)
def test_move_is_checked_and_keeps_work(schedule: str, data: st.DataObject) -> None:
    before = make_state(schedule, ranks="2", microbatches="4", progress_model="per_device")
    program = STUDIO.make_request(StudioState.from_json(before)).program
    rank = data.draw(st.integers(0, 1))
    size = len(program.streams[rank])
    index, to = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, size))
    answer = ask({"state": before, "move": [rank, index, to]})
    if "error" in answer:
        assert answer["error"]["fact"]
        return
    moved_program = from_text(answer["state"]["program"])
    shown_program = STUDIO.make_request(StudioState.from_json(answer["state"])).program
    check(shown_program, "per_device")
    assert answer["runs"][0]["digest"] == shown_program.digest

    def list_work(program: Any) -> list[list[int]]:
        return [sorted((stream.words & 0xFFFFFFFFFFFF).tolist()) for stream in program.streams]

    assert list_work(extract_compute(moved_program)) == list_work(extract_compute(program))


def test_message_moves_in_lowered_program() -> None:
    program = STUDIO.make_request(StudioState.from_json(make_state())).program
    texts = [str(instr) for instr in program.streams[1]]
    index = texts.index("send_act 1.0")
    answer = ask({"state": make_state(), "move": [1, index, index + 2]})
    assert answer["source_type"] == "lowered"
    moved_stream = from_text(answer["state"]["program"]).streams[1]
    assert [str(instr) for instr in moved_stream][index + 1] == "send_act 1.0"
    refusal = ask({"state": make_state(), "move": [1, texts.index("recv_act 1.0"), len(texts)]})
    assert refusal["error"]["is_refused"] and refusal["error"]["sites"]


@pytest.mark.parametrize("schedule", ["one_f_one_b", "zb_v", "interleaved(group=4)", "dualpipe_v"])
def test_exports_reproduce_program(schedule: str) -> None:
    given_state = make_state(
        schedule, costs="F=1,B=2:3:2:3:2:3:2:3" if "v" in schedule[3:] else "B=2"
    )
    program = STUDIO.make_request(StudioState.from_json(given_state)).program
    texts = {
        name: ask({"state": given_state, "export": name})["text"]
        for name in ("sched", "python", "call")
    }
    assert from_text(texts["sched"]) == program
    exported_names: dict[str, Any] = {}
    exec(texts["python"], exported_names)
    function = exported_names[program.name]
    shape = program.shape
    recompiled = compile(
        function,
        ranks=shape.ranks,
        microbatches=shape.microbatches,
        stages_per_rank=shape.stages_per_rank,
        placement=shape.placement,
    )
    assert extract_compute(recompiled) == extract_compute(program)
    called: dict[str, Any] = {"print": lambda *_: None}
    exec(texts["call"], called)
    assert called["timeline"].span == pytest.approx(ask({"state": given_state})["runs"][0]["span"])


def test_edited_program_exports_csv_and_call() -> None:
    edited = ask({"state": make_state(), "move": [0, 0, 4]})["state"]
    program = STUDIO.make_request(StudioState.from_json(edited)).program
    assert ask({"state": edited, "export": "csv"})["text"] == torch_csv.to_csv(program)
    called: dict[str, Any] = {"print": lambda *_: None}
    exec(ask({"state": edited, "export": "call"})["text"], called)
    assert called["program"].digest == program.digest


def test_gap_lists_costs_that_shorten_it() -> None:
    answer = ask({"state": make_state(), "explain": [0, 8]})
    assert all(gap_cost["new_gap"] < gap_cost["old_gap"] for gap_cost in answer["gap_costs"])
    assert "B of stage 3" in [gap_cost["cost"] for gap_cost in answer["gap_costs"]]
    change_by_schedule = {
        change["state"]["schedule"]: change for change in answer["changes"] if change["state"]
    }
    assert {"zb_v", "one_f_one_b"} <= change_by_schedule.keys()
    for change in change_by_schedule.values():
        shown_run = ask({"state": change["state"]})["runs"][0]
        assert f"span {shown_run['span']:.4g}" in change["effect"]
    assert change_by_schedule["zb_v"]["state"]["options"]["costs"] == "F=0.5,B=1,send=0.1"
    assert change_by_schedule["zb_v"]["state"]["options"]["sizes"] == "saved=0.5GB"


# ---------------------------------------------------------------- states and sources


def test_state_formats_as_command() -> None:
    options = {"ranks": "4", "placement": "vee", "costs": "F=1:2", "zero": "1", "overlap": "yes"}
    words = shlex.split(
        format_command(
            StudioState("zb_v", options=options), compile("zb_v", ranks=4, microbatches=8)
        )
    )
    assert words[:3] == ["schedir", "draw", "zb_v"] and read_options(words[3:]) == options
    parser = argparse.ArgumentParser()
    add_source(parser)
    add_compile_options(parser)
    args = parser.parse_args(words[2:])
    assert make_request(args, args.source).specified["zero"] == 1


def test_command_names_exported_file_and_function() -> None:
    edited = ask({"state": make_state(schedule="interleaved"), "move": [0, 0, 4]})
    file = ask({"state": edited["state"], "export": "sched"})["file"]
    assert file == "interleaved.sched"
    assert edited["command"].split()[:4] == ["schedir", "draw", file, "--costs"]
    for code, name in (
        (CODE, "mine"), (f"{CODE}\nalias = mine\n", "alias"),
        ("from schedir import B, F\nbrief = lambda r, p, m: m * (F + B)", "brief"),
    ):  # fmt: skip
        answer = ask({"state": make_state() | {"code": code}}, WITH_CODE)
        assert answer["command"].startswith(f"schedir draw {name}.py:{name} --ranks 4")


def test_run_is_shown_with_prediction(tmp_path: Any) -> None:
    run = simulate(compile("one_f_one_b", ranks=2, microbatches=4))
    spans = run.spans.copy()
    spans["start"], spans["end"] = spans["start"] * 2e-3, spans["end"] * 2e-3
    save_timeline(type(run)(run.program, spans, "measured", "s"), tmp_path / "x.timeline")
    studio = Studio(Source(str(tmp_path / "x.timeline")))
    answer = ask({"state": {"run": True}}, studio)
    assert [run_data["label"] for run_data in answer["runs"]] == ["predicted", "measured"]
    assert answer["source_type"] == "run" and answer["recognition"] == "this is one_f_one_b"
    assert "error" in ask({"state": {"run": True}, "export": "call"}, studio)


def test_two_schedules_are_compared_per_rank() -> None:
    answer = ask({"state": make_state(costs="F=1,B=2") | {"other": "zb_v"}})
    this_run, other_run = answer["runs"]
    assert [this_run["label"], other_run["label"]] == ["one_f_one_b", "zb_v"]
    busy = [run["span"] * (1 - run["bubble"]) for run in (this_run, other_run)]
    assert busy[0] == pytest.approx(busy[1])  # both runs have the work of the same model
    assert answer["comparison"].startswith("Compared with zb_v: span +")
    moved_answer = ask({"state": make_state() | {"other": "zb_h1"}, "move": [0, 0, 4]})
    assert len(moved_answer["runs"]) == 2 and moved_answer["state"]["other"] == "zb_h1"
    odd = make_state("one_f_one_b", ranks="3") | {"other": "chimera"}
    assert ask({"state": odd})["error"]["fields"] == ["other"]


SOLUTIONS: dict[str, dict[str, Any]] = {
    "fill-and-drain": {"schedule": "gpipe", "code": ""},
    "one-forward-one-backward": {"schedule": "one_f_one_b"},
    "interleaving": {"schedule": "interleaved"},
    "zero-bubble": {"schedule": "zb_h1"},
    "v-shape": {"schedule": "zb_v", "memory_limit": "8GB"},
    "less-memory": {"schedule": "v_half"},
    "uneven-stages": {"schedule": "zb_h1"},
    "slow-links": {"schedule": "zb_h2"},
    "weight-gathers": {"unsharded_stages": ""},
    "a-hang": {"code": CODE},
}


@pytest.mark.parametrize("name", CHALLENGES)
def test_challenge_has_solution_and_proof(name: str) -> None:
    challenge = CHALLENGES[name]
    first_state = challenge.make_state(name)
    before = ask({"state": first_state}, WITH_CODE)
    assert "error" in before or not before["challenge"]["is_solved"]
    solution = SOLUTIONS[name]
    options = first_state["options"] | {k: v for k, v in solution.items() if k not in first_state}
    solved = {
        **first_state,
        **{k: v for k, v in solution.items() if k in first_state},
        "options": options,
    }
    after = ask({"state": solved}, WITH_CODE)
    assert after["challenge"]["is_solved"], after["challenge"]
    assert ("optimal" in after["challenge"]["text"]) is (challenge.goal == challenge.bound)
    easier = {**solved, "options": options | {"microbatches": "2"}}
    cheated = ask({"state": easier}, WITH_CODE)
    assert "error" in cheated or "microbatches=" in cheated["challenge"]["text"]
    request = WITH_CODE.make_request(StudioState.from_json(solved))
    limit = request.memory_limit
    proof = lower_bound(
        request.timeline.program.shape,
        request.costs,
        request.sizes if limit else None,
        limit,
        split_backward=challenge.includes_split_backwards,
    )
    assert proof.value == pytest.approx(challenge.bound)
    assert challenge.bound <= challenge.goal


# ---------------------------------------------------------------- code


@pytest.mark.parametrize(
    ("code", "line"),
    [("x = (\n", 1), ("\n\nimport nothing_like_this", 3), ("x = 1", 0), ("raise SystemExit", 1),
     ("def f(r, p, m):\n    x = 1\n    return x / 0", 3), ("def f(a):\n    return a", 0),
     ("def f(r, p, m):\n    return 3", 0)],
)  # fmt: skip
def test_code_error_has_line(code: str, line: int) -> None:
    with pytest.raises(CodeError) as caught:
        expand_code(StudioState(code=code, options=DEFAULTS))
    assert caught.value.line == line and caught.value.fact


def test_code_compiles_its_function() -> None:
    text = expand_code(StudioState(code=CODE, options=DEFAULTS))
    assert from_text(text).name == "mine"
    program = compile(from_text(text))
    assert program.streams == compile("one_f_one_b", ranks=4, microbatches=8).streams
    two = CODE + "\n\ndef other(r, p, m):\n    return m * (F + B)\n"
    assert from_text(expand_code(StudioState(code=two, options=DEFAULTS))).name == "other"
    state_with_function = StudioState(code=two, function="mine", options=DEFAULTS)
    assert expand_code(state_with_function) == text


def test_code_runs_again_only_if_request_allows() -> None:
    runs: list[str] = []

    def expand(state: StudioState) -> str:
        runs.append(state.code)
        return expand_code(state)

    studio, changed_code = Studio(expand_code=expand), make_state() | {"code": f"# changed\n{CODE}"}
    first_state = make_state() | {"code": CODE}
    assert ask({"state": first_state, "run_code": False}, studio)["error"]["hint"] == "press Run"
    for code_state in (
        first_state,
        changed_code,
        first_state | {"options": first_state["options"] | {"costs": "F=2"}},
    ):
        assert "error" not in ask({"state": code_state}, studio)
    assert runs == [CODE, changed_code["code"]]
    for code_state in (first_state, changed_code):
        assert "error" not in ask({"state": code_state, "run_code": False}, studio)
    assert "error" not in ask({"state": make_state(ranks="3") | {"code": CODE}}, studio)
    assert len(runs) == 3


def test_code_runs_within_limits() -> None:
    runner = CodeRunner(1000, max_seconds=20)

    def get_code_error(code: str) -> CodeError:
        with pytest.raises(CodeError) as caught:
            runner.expand(StudioState(code=code, options=DEFAULTS))
        return caught.value

    try:
        assert "mine" in runner.expand(StudioState(code=CODE, options=DEFAULTS))
        large_code = "def f(r, p, m):\n    return bytearray(2 * 10**9)"
        error = get_code_error(large_code)
        assert "MemoryError" in error.fact and error.line == 2
        assert "exit status 7" in get_code_error("import os\nos._exit(7)").fact
        assert get_code_error("from schedir import F\ndef f(r, p, m):\n    return 10**6 * F").fact
        runner._max_seconds = 0.2
        assert "0.2 s" in get_code_error("while True:\n    pass").fact
    finally:
        runner.close()
    assert all(process.poll() is not None for process in runner._processes)


def test_running_code_fails_when_studio_stops() -> None:
    runner = CodeRunner(1000, max_seconds=20)
    stop = Timer(1, runner.close)
    stop.start()
    with pytest.raises(CodeError, match="the studio has stopped"):
        runner.expand(StudioState(code="while True:\n    pass", options=DEFAULTS))
    stop.join()
    with pytest.raises(CodeError, match="the studio has stopped"):
        runner.expand(StudioState(code=CODE, options=DEFAULTS))
