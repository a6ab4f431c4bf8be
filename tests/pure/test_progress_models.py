"""Progress models with several communicators, eager messages and lazy communicators."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from schedir.analysis.critical_path.longest_path import compute_earliest_times
from schedir.analysis.dependency_graph import Graph
from schedir.analysis.progress_models import MODELS, ProgressModel
from schedir.compiler.compile import compile
from schedir.errors import ChannelMismatchError, DeadlockError, SchedirError, UsageError
from schedir.ir.cost.costs import Costs
from schedir.ir.cost.sizes import EagerMessages, Sizes
from schedir.ir.isa.instructions import Opcode as O
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program, Proof
from schedir.ir.text_format import to_text
from schedir.passes.communication.transfer_overlap import post_receives_early
from schedir.predict.simulate import simulate
from schedir.schedules import interleaved, one_f_one_b
from schedir.verify.check import build_complete_graph, check
from tests.commands import run_command
from tests.commands import run_refused_command as refuses
from tests.edits import written
from tests.mutants import FEW, any_legal, mutate, refusal, reordered
from tests.oracle import Machine
from tests.oracle_host import MESSAGES, SENDING
from tests.oracle_threads import verdict
from tests.strategies import with_slots

GOLDEN = Path(__file__).parents[1] / "golden" / "models.txt"
LOOP, VEE = "stages_per_rank 2", "stages_per_rank 2 placement vee"
REORDER = ("run_order", "swap_neighbors", "swap_any", "move_anywhere", "swap_receives",
           "early_receive", "late_send", "join_both_sides", "join_next_transfer",
           "join_transfers", "reorder_group", "ungroup")  # fmt: skip
seeds, models = st.integers(0, 2**32), st.sampled_from(MODELS)

# torch's 1F1B with one microbatch on three ranks. It groups the last send of a warmup with a
# receive.
ALONE = written(
    "F 0.0; send_act 0.0 & recv_grad 0.0; B 0.0; reduce_grads 0; step",
    "recv_act 1.0; F 1.0; send_act 1.0 & recv_grad 1.0; B 1.0; send_grad 1.0; reduce_grads 1; step",
    "recv_act 2.0; F 2.0; B 2.0; send_grad 2.0; reduce_grads 2; step",
)
# Both ranks send before they receive.
CROSSED = written(
    "F 0.0; send_act 0.0; F 0.1; send_act 0.1; recv_act 3.0; recv_act 3.1; F 3.0; F 3.1",
    "recv_act 1.0; F 1.0; F 2.0; send_act 2.0; recv_act 1.1; F 1.1; F 2.1; send_act 2.1",
    microbatches=2, header=VEE,
)  # fmt: skip
# Every rank posts its receive first, so the ranks wait in a ring.
RING = written(
    "recv_act 4.0; F 0.0; send_act 0.0; F 4.0; send_act 4.0",
    "recv_act 1.0; F 1.0; send_act 1.0; recv_act 5.0; F 5.0; send_act 5.0",
    "recv_act 2.0; F 2.0; send_act 2.0; recv_act 6.0; F 6.0; send_act 6.0",
    "recv_act 3.0; F 3.0; send_act 3.0; recv_act 7.0; F 7.0",
    header=LOOP,
)

# Rank 2 never uses the communicator of all ranks, because it has no group of sends and receives.
BATCHES = written(
    "F 0.0; send_act 0.0; F 0.1; send_act 0.1 & recv_grad 0.0; B 0.0; recv_grad 0.1; B 0.1;"
    "reduce_grads 0; step",
    "recv_act 1.0; F 1.0; send_act 1.0; recv_grad 1.0; B 1.0; send_grad 1.0 & recv_act 1.1; F 1.1;"
    "send_act 1.1; recv_grad 1.1; B 1.1; send_grad 1.1; reduce_grads 1; step",
    "recv_act 2.0; F 2.0; B 2.0; send_grad 2.0; recv_act 2.1; F 2.1; B 2.1; send_grad 2.1;"
    "reduce_grads 2; step",
    microbatches=2,
)


def check_refused(
    program: Program, progress_model: ProgressModel = "per_device", **options: object
) -> SchedirError:
    with pytest.raises(SchedirError) as caught:
        check(program, progress_model, **options)  # type: ignore[arg-type]
    return caught.value


def test_errors_match_golden_file() -> None:
    """Compare the errors that only these progress models raise with the golden file."""
    wrong_order = written(
        "F 0.0; send_act 0.0; F 0.1; send_act 0.1", "recv_act 1.1; recv_act 1.0; F 1.0; F 1.1",
        microbatches=2,
    )  # fmt: skip
    errors = [
        check_refused(ALONE, "torch_lazy"),
        check_refused(CROSSED, sizes=Sizes(activation=(2.0**24, 1.0, 2.0**25, 1.0))),
        check_refused(CROSSED, eager_limit=10, sizes=Sizes(activation=(20.0, 1.0, 3e6, 1.0))),
        check_refused(wrong_order, eager_limit=1, sizes=Sizes(activation=1)),
        check_refused(RING, "per_pair", lazy_communicators=True),
        check_refused(BATCHES, "torch_lazy", lazy_communicators=True),
    ]
    assert "\n".join(map(str, errors)) + "\n" == GOLDEN.read_text()


# ---------------------------------------------------------------- torch's communicators


def test_send_and_receive_on_two_communicators_are_refused() -> None:
    error = check_refused(ALONE, "torch_lazy")
    assert isinstance(error, ChannelMismatchError)
    assert [(s.rank, s.index, str(s.instr)) for s in error.sites] == [
        (0, 1, "send_act 0.0"), (1, 0, "recv_act 1.0"),
    ]  # fmt: skip
    for unchecked in (False, True):
        with pytest.raises(ChannelMismatchError):
            simulate(ALONE, progress_model="torch_lazy", skip_checks=unchecked)
    assert {model for model in MODELS if not refusal(ALONE, model)} == {*MODELS} - {"torch_lazy"}
    assert verdict(ALONE, "torch_lazy").kind == "hang"


def test_torch_lazy_without_groups_equals_per_pair() -> None:
    shape = PipelineShape(4, 8, 2)
    for program in (compile(interleaved, shape), compile(one_f_one_b, PipelineShape(4, 8))):
        lazy, per_pair = (
            simulate(program, Costs(send=0.5), progress_model=m) for m in ("torch_lazy", "per_pair")
        )
        assert (lazy.spans == per_pair.spans).all()


def test_torch_lazy_separates_groups_and_single_messages() -> None:
    """Only under torch_lazy do groups and single messages have different queues."""
    program = written(
        "F 0.0; F 0.1; send_act 0.0 & recv_act 3.1; send_act 0.1; F 3.1; recv_act 3.0; F 3.0",
        "recv_act 1.1; F 1.1; F 2.1; recv_act 1.0 & send_act 2.1; F 1.0; F 2.0; send_act 2.0",
        microbatches=2, header=VEE,
    )  # fmt: skip
    assert [model for model in MODELS if not refusal(program, model)] == ["torch_lazy"]
    assert [model for model in MODELS if verdict(program, model).kind == "ok"] == ["torch_lazy"]


@settings(max_examples=150)
@given(seeds, st.sampled_from(REORDER), models)
def test_graph_times_match_machine_for_groups(
    seed: int, name: str, progress_model: ProgressModel
) -> None:
    """The dependency graph and the reference simulator give equal times for any groups."""
    _, program = mutate(name, seed, corpus=FEW)
    assert_equal_times(with_slots(program, random.Random(seed)), progress_model, None, seed)


# ---------------------------------------------------------------- eager messages


def assert_equal_times(
    program: Program, progress_model: ProgressModel, eager_messages: EagerMessages | None, seed: int
) -> None:
    """Assert that graph and reference simulator end the same instructions at equal times."""
    rng = random.Random(seed)
    priced = Costs(**{name: float(rng.randint(0, 4)) for name in ("F", "B", "I", "W", "send")})
    machine = Machine(program, progress_model, priced)
    if eager_messages:
        act, grad, skip = (
            getattr(eager_messages.sizes, k) for k in ("activation", "activation_grad", "skip")
        )
        machine.small, machine.sizes = eager_messages.max_bytes, (act, grad, skip)
    try:
        graph = build_complete_graph(program, progress_model, eager_messages=eager_messages)
    except SchedirError:
        return  # the reference simulator does not check groups
    reached = compute_earliest_times(graph, priced)
    assert machine.run() == reached.is_done.all()
    event("ends" if reached.is_done.all() else "hangs")
    if not reached.is_done.all():
        return
    group_ends = np.zeros(graph.node_id_limit)  # a group ends when all its transfers have ended
    np.maximum.at(group_ends, graph.entry_exit_nodes[1], reached.end)
    for (rank, index), end in machine.ended.items():
        assert group_ends[graph.entry_exit_nodes[1][int(program.offsets[rank]) + index]] == end


@settings(max_examples=150)
@given(seeds, st.sampled_from(REORDER), models, st.sampled_from([0.0, 1.0, 2.0, 4.0]))
def test_graph_times_match_machine_with_eager_messages(
    seed: int, name: str, progress_model: ProgressModel, limit: float
) -> None:
    _, program = mutate(name, seed, corpus=FEW)
    eager = EagerMessages(limit, Sizes(activation=2.0, activation_grad=4.0, skip=1.0))
    assert_equal_times(with_slots(program, random.Random(seed)), progress_model, eager, seed)


@settings(max_examples=300)
@given(seeds, st.sampled_from(REORDER), models, st.integers(0, 4), st.data())
def test_eager_check_agrees_with_execution(
    seed: int, name: str, progress_model: ProgressModel, limit: int, data: st.DataObject
) -> None:
    """With eager messages, the checker accepts exactly the programs that the oracle can run."""
    _, program = mutate(name, seed, corpus=FEW)
    stages = program.shape.stages
    activation_sizes = data.draw(st.lists(st.integers(1, 5), min_size=stages, max_size=stages))
    sizes = Sizes(activation=tuple(map(float, activation_sizes)), skip=3.0)
    outcome = verdict(program, progress_model, seed, limit, sizes)
    try:
        check(program, progress_model, eager_limit=limit, sizes=sizes)
        why = ""
    except SchedirError as error:
        why = f"{type(error).__name__}: {error}"
    without_eager = "refused" if refusal(program, progress_model) else "fine"
    event(f"{outcome.kind}, {without_eager} where all wait")
    assert bool(why) == (outcome.kind != "ok"), (why, outcome)


@settings(max_examples=100)
@given(seeds, st.sampled_from(REORDER), models, st.data())
def test_suggested_eager_limit_is_minimal(
    seed: int, name: str, progress_model: ProgressModel, data: st.DataObject
) -> None:
    """A program finishes with the `eager_limit` of its DeadlockError, and with no smaller limit."""
    _, program = mutate(name, seed, corpus=FEW)
    stages = program.shape.stages
    activation_sizes = data.draw(st.lists(st.integers(1, 5), min_size=stages, max_size=stages))
    sizes = Sizes(activation=tuple(map(float, activation_sizes)), skip=3.0)
    try:
        check(program, progress_model, sizes=sizes)
    except DeadlockError as error:
        min_limit = error.eager_limit
    except SchedirError:
        return
    else:
        return
    event("hangs anyway" if min_limit is None else "finishes with small messages")
    fine = [k for k in range(6) if verdict(program, progress_model, seed, k, sizes).kind == "ok"]
    assert fine == [k for k in range(6) if min_limit is not None and k >= min_limit]


def test_eager_sends_depend_on_message_size() -> None:
    """A message is eager if its size is within the limit. A gradient has the size of its input."""
    program = written(
        "F 0.0; send_act 0.0; recv_grad 0.0; B 0.0; reduce_grads 0; step",
        "recv_act 1.0; F 1.0; B 1.0; send_grad 1.0; reduce_grads 1; step",
    )
    sends = {}
    for name, sizes in {
        "equal": Sizes(activation=(3.0, 100.0)),
        "own": Sizes(activation=(3.0, 100.0), activation_grad=(9.0, 1.0)),
    }.items():
        for limit in (2, 3, 8, 9):
            graph = Graph(program, eager_messages=EagerMessages(limit, sizes))
            sends[name, limit] = [str(graph.index.locate(k)[2]) for k in graph.eager_sends]
    both, act = ["send_act 0.0", "send_grad 1.0"], ["send_act 0.0"]
    assert sends == {
        ("equal", 2): [], ("equal", 3): both, ("equal", 8): both, ("equal", 9): both,
        ("own", 2): [], ("own", 3): act, ("own", 8): act, ("own", 9): both,
    }  # fmt: skip
    sliced = compile(one_f_one_b, PipelineShape(2, 1), tp=4)
    for limit, number in ((24, 0), (25, 2)):
        graph = Graph(sliced, eager_messages=EagerMessages(limit, Sizes(activation=100.0)))
        assert len(graph.eager_sends) == number


def test_proof_has_its_eager_limit() -> None:
    sizes = Sizes(activation=8.0)
    for _ in range(2):
        check(CROSSED, eager_limit=8, sizes=sizes)
        error = check_refused(CROSSED, sizes=sizes)
        assert isinstance(error, DeadlockError) and error.eager_limit == 8
    assert Proof("per_device", eager_messages=EagerMessages(8.0, sizes)) in CROSSED.proofs
    assert Proof("per_device") not in CROSSED.proofs
    assert isinstance(check_refused(CROSSED, eager_limit=7, sizes=sizes), DeadlockError)
    with pytest.raises(DeadlockError):
        simulate(CROSSED)


def test_graph_with_eager_limit_is_not_cached() -> None:
    eager = EagerMessages(1, Sizes(activation=1))
    assert Graph.from_program(CROSSED) is Graph.from_program(CROSSED)
    assert Graph.from_program(CROSSED, eager_messages=eager) is not Graph.from_program(
        CROSSED, eager_messages=eager
    )


@pytest.mark.parametrize("wrong", [-1, True, "1", float("nan"), float("inf")])
def test_invalid_eager_limit_is_refused(wrong: object) -> None:
    with pytest.raises(UsageError) as caught:
        check(CROSSED, eager_limit=wrong, sizes=Sizes(activation=1))  # type: ignore[arg-type]
    assert caught.value.fields == ("eager_limit",)


@pytest.mark.parametrize("sizes", [None, Sizes(), Sizes(saved=1)])
def test_eager_limit_needs_activation_size(sizes: Sizes | None) -> None:
    with pytest.raises(UsageError) as caught:
        check(CROSSED, eager_limit=8, sizes=sizes)
    assert caught.value.fields == ("sizes",)


def test_wrong_number_of_sizes_is_refused() -> None:
    program = compile(one_f_one_b, PipelineShape(2, 2))
    for sizes in (Sizes(activation=(1, 2, 3)), Sizes(activation=1, activation_grad=(1, 2, 3))):
        for eager in (None, 1):
            with pytest.raises(UsageError, match="3"):
                check(program, eager_limit=eager, sizes=sizes)


# ---------------------------------------------------------------- first uses


def all_hosts_end(program: Program, model: str, seed: int) -> bool:
    """Return whether all hosts end if a communicator is created at its first use."""
    rng, shape, machine = random.Random(seed), program.shape, Machine(program, model, Costs())
    hosts: list[list[object]] = []
    for rank, stream in enumerate(program.streams):
        host_groups: list[object] = []
        begins = [k for k, joined in enumerate(stream.joined) if not joined] + [len(stream)]
        for begin, end in pairwise(begins):
            group = [*stream][begin:end]
            is_exchange = len({i.op in SENDING for i in group}) == 2
            for i in group:
                if i.op not in MESSAGES:
                    continue
                peer = int(shape.rank_of_stage(machine._other(i), i.mb))
                acts = (O.SendAct, O.RecvAct, O.SendSkip, O.RecvSkip)
                kind = "act" if i.op in acts else "grad"
                edge = (rank, peer) if i.op in SENDING else (peer, rank)
                pair = frozenset(edge)
                host_groups.append(
                    {"per_edge": (kind, edge), "per_pair": pair, "per_direction": kind,
                     "torch_lazy": "all" if is_exchange else pair}.get(model, "all")
                )  # fmt: skip
        hosts.append(host_groups)
    arrived: dict[object, set[int]] = {}
    while True:
        moves = []
        for rank, host_groups in enumerate(hosts):
            if host_groups:
                members = {r for r, other in enumerate(hosts) if host_groups[0] in other}
                if isinstance(host_groups[0], str):
                    members = {*range(shape.ranks)}
                if (
                    rank not in arrived.get(host_groups[0], ())
                    or arrived[host_groups[0]] >= members
                ):
                    moves.append((rank, members))
        if not moves:
            return not any(hosts)
        rank, members = rng.choice(moves)
        arrived_ranks = arrived.setdefault(hosts[rank][0], set())
        arrived_ranks.add(rank)
        if arrived_ranks >= members:
            hosts[rank].pop(0)


@settings(max_examples=200)
@given(seeds, models)
def test_lazy_communicator_check_agrees_with_hosts(
    seed: int, progress_model: ProgressModel
) -> None:
    rng = random.Random(seed)
    program = any_legal(seed, corpus=FEW)
    if rng.random() < 0.7:
        program = post_receives_early(reordered(program, rng), "per_edge", rng.randint(1, 3))
    if refusal(program, progress_model):
        return
    past = all_hosts_end(program, progress_model, seed)
    event(f"{past}")
    if past:
        check(program, progress_model, lazy_communicators=True)
        assert Proof(progress_model, lazy_communicators=True) in program.proofs
        return
    assert isinstance(
        check_refused(program, progress_model, lazy_communicators=True),
        DeadlockError | ChannelMismatchError,
    )


def test_ring_of_early_receives_deadlocks() -> None:
    check(RING, "per_pair")
    error = check_refused(RING, "per_pair", lazy_communicators=True)
    assert isinstance(error, DeadlockError)
    assert [(w.rank, str(w.instr), w.needed_rank, w.current_index) for w in error.cycle] == [
        (0, "recv_act 4.0", 3, 0), (3, "recv_act 3.0", 2, 0),
        (2, "recv_act 2.0", 1, 0), (1, "recv_act 1.0", 0, 0),
    ]  # fmt: skip


def test_unused_lazy_communicator_of_all_ranks_is_refused() -> None:
    check(BATCHES, "torch_lazy")
    error = check_refused(BATCHES, "torch_lazy", lazy_communicators=True)
    assert isinstance(error, ChannelMismatchError)
    assert [str(s.instr) for s in error.sites] == ["send_act 0.1"]


def test_lazy_communicators_refuse_blocking_hosts() -> None:
    for host in ("blocking_hosts", "host_device_sync"):
        with pytest.raises(UsageError) as caught:
            check(RING, "per_pair", lazy_communicators=True, **{host: True})  # type: ignore[arg-type]
        assert caught.value.fields == ("lazy_communicators", host)


# ---------------------------------------------------------------- the command


def test_check_command_prints_eager_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "x.sched")
    Path(path).write_text(to_text(CROSSED))
    assert "no message waits for its receive" in refuses(capsys, "check", path)
    argv = ["check", path, "--sizes", "activation=16MB"]
    assert "messages of at most 16 MB do not wait for their receives" in refuses(capsys, *argv)
    assert "16 MB do not wait" in refuses(capsys, *argv, "--eager-limit", "15MB")
    assert run_command(capsys, *argv, "--eager-limit", "16000KB").endswith(
        ", if messages of at most 16 MB do not wait for their receive\n"
    )
    assert "--sizes activation=16MB" in refuses(capsys, "check", path, "--eager-limit", "1")


def test_check_command_with_lazy_communicators(capsys: pytest.CaptureFixture[str]) -> None:
    out = run_command(capsys, "check", "gpipe", "--ranks", "3", "--lazy-communicators")
    assert out.endswith("and blocking_serial, if each communicator is created at its first use\n")
    for option, known in (("--lazy-communicators", False), ("--host-device-sync", True)):
        facts = json.loads(run_command(capsys, "check", "gpipe", "--json", option))
        assert ("progress_models_with_blocking_hosts" in facts) == known
