"""Check new instructions without a run: order, memory, text, pictures, export, explanation.

    python static_checks.py NAME... FOLDER

It runs in a copy of the tree that has the new rows, without torch. It writes its files to FOLDER.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from functools import partial
from io import StringIO
from itertools import accumulate
from typing import Any

import schedir
from schedir import Cluster, Costs, PipelineShape, Program, Sizes
from schedir.__main__ import main
from schedir.commands.simulate import count_sent_bytes
from schedir.compiler.relower import Lowering, extract_compute
from schedir.io import perfetto, torch_csv
from schedir.ir.isa.instructions import INSTRUCTIONS, OPS_OFF_COMPUTE_LANE, Lane, Value
from schedir.passes.pass_registry import OPTION_BY_OPCODE
from schedir.predict.what_if import advise
from schedir.schedules import interleaved, one_f_one_b, zb_h1
from tests.new_rows import NEW


def fill_costs(shape: PipelineShape, activation: Any = 8, **groups: int) -> Any:
    """Return the costs of a program on one node. The saved activations of a forward have 10 bytes.

    Args:
        shape: The shape of the program.
        activation: The bytes of an activation.
        **groups: `tp`, `dp` and `zero`.
    """
    processes = shape.ranks * groups.get("tp", 1) * groups.get("dp", 1)
    node = Cluster(1, processes, flops=1, memory=1, hbm_bandwidth=2, nvlink_bandwidth=1,
                   network_bandwidth=1, disk_bandwidth=5, kernel_us=0)  # fmt: skip
    sizes = Sizes(activation=activation, saved=10, params=1, grads=1, optimizer=1)
    return node.fill_costs(shape, sizes, Costs(F=1, B=2), **groups)


def to_flat_text(program: Program) -> str:
    """Return the text of a program with one instruction per line."""
    return schedir.to_text(program, folded=False)


def assert_refused(text: str, error: str, *sites: str) -> None:
    """Assert that `check` refuses a program.

    Args:
        text: The text of the program.
        error: The name of the error's type.
        *sites: The instructions that the error names.
    """
    try:
        schedir.check(schedir.from_text(text))
    except schedir.errors.SchedirError as caught:
        found = [str(site.instr) for site in caught.sites]
        assert type(caught).__name__ == error and found == [*sites], (caught, found)
        assert str(caught)
    else:
        raise AssertionError(f"check does not raise {error} for {sites}")


def move_line(text: str, instruction: str, before: str) -> str:
    """Return a text with an instruction moved before another one, or removed if that is ""."""
    line, next_line = f"  {instruction}\n", f"  {before}\n"
    assert text.count(line) == 1 and (not before or next_line in text), (instruction, before)
    text = text.replace(line, "")
    return text.replace(next_line, line + next_line, 1) if before else text


def assert_moves_refused(text: str, *moves: tuple[str, ...]) -> None:
    """Assert that `check` refuses programs in which an instruction is moved or removed.

    Args:
        text: The text of the program.
        *moves: The arguments of `move_line`, and then those of `assert_refused`.
    """
    for instruction, before, error, *sites in moves:
        assert_refused(move_line(text, instruction, before), error, *sites)


def check_all_readers(program: Program, text: str, costs: Costs, folder: str) -> None:
    """Check round trips, lowering, pictures, files, exports and advice of a program.

    Args:
        program: The program.
        text: The text of one of its new instructions.
        costs: The costs of its simulation.
        folder: The folder for files.
    """
    assert schedir.from_text(schedir.to_text(program)) == program == schedir.check(program)
    again = Lowering(program, "per_device").compile_draft(extract_compute(program), None)
    assert again.used_opcodes == program.used_opcodes, "lowering again loses instructions"
    run = schedir.simulate(program, costs, sizes=Sizes(activation=1, saved=10))
    assert f'"{text} ' in perfetto.to_json(run)
    schedir.viz.save(schedir.viz.gantt(run, show="lanes,path,phases,memory"), f"{folder}/x.png")
    assert text in schedir.viz.html(run)
    schedir.save_timeline(run, f"{folder}/x.timeline")
    assert schedir.load_timeline(f"{folder}/x.timeline").program == program
    try:
        schedule: Callable[..., object] = getattr(schedir.schedules, program.name)
        plain = schedir.compile(schedule, program.shape)
        assert torch_csv.to_csv(program) == torch_csv.to_csv(plain)
    except schedir.errors.UsageError as error:
        moves = program.used_opcodes & {*OPS_OFF_COMPUTE_LANE[Value.SAVED]}
        new = [f"has {INSTRUCTIONS[op].text}, but torch's" for op in program.used_opcodes & NEW]
        reasons = ["offloads activations"] if moves else new
        assert any(reason in str(error) for reason in reasons)
        options = {OPTION_BY_OPCODE.get(op) for op in program.used_opcodes & NEW} - {None}
        assert moves or not options or error.hint == f"compile it without {options.pop()}"
    else:
        raise AssertionError("the export to torch does not refuse the new instruction")
    advise(run, costs)
    assert run.idle is not None and run.critical_path.size


def stash(folder: str) -> None:
    sizes, shape = Sizes(saved=10), PipelineShape(4, 8)
    plain = schedir.compile(one_f_one_b, shape)
    stashing: Any = partial(schedir.compile, one_f_one_b, shape, stash=True)
    program = stashing(debug=True)
    for time in 0.0, 0.25, 5.0:
        costs = Costs(F=1, B=2, stash=time)
        before, run = (schedir.simulate(p, costs, sizes=sizes) for p in (plain, program))
        assert run.peak_in_flight.tolist() == before.peak_in_flight.tolist() == [4, 3, 2, 1]
        # Compute the peaks from the spans: a value is on the device from the start of F or Unstash
        # to the end of Stash or B. At the same time, memory is freed before other memory is taken.
        changes_by_rank = [[] for _ in range(4)]
        for span in run.spans:
            name = schedir.Opcode(span["op"]).name
            if name in ("Forward", "Unstash"):
                changes_by_rank[span["rank"]].append((span["start"], 10))
            elif name in ("Stash", "Backward"):
                changes_by_rank[span["rank"]].append((span["end"], -10))
        peaks = [
            max(accumulate(change for _, change in sorted(changes))) for changes in changes_by_rank
        ]
        assert run.peak_memory.tolist() == peaks, (time, run.peak_memory, peaks)
        disk = [max(curve.total) for curve in run.memory_on("disk")]
        # Moves that take no time leave nothing on the disk. The last rank moves nothing.
        assert (disk[0] > 0) == (time > 0) and disk[3] == 0
        assert all(curve.total[-1] == 0 for curve in run.memory_on("disk"))
    check_all_readers(program, "stash", Costs(F=1, B=2, stash=0.25), folder)
    # The order of the Stream does not show when another lane has moved a value. So the check of a
    # memory limit counts the value until it is freed, or all slots if their number is given.
    try:
        stashing(sizes=sizes, memory_limit=35)
    except schedir.errors.MemoryLimitError as error:
        assert error.required_bytes == 40
    else:
        raise AssertionError("compile does not refuse the memory limit")
    few = stashing(buffer_sharing="minimal")
    assert schedir.from_text(schedir.to_text(few)) == few and {s.saved for s in few.slots} == {1}
    stashing(buffer_sharing="minimal", sizes=sizes, memory_limit=10)
    late = schedir.simulate(few, Costs(F=1, B=2, stash=0.25), sizes=sizes)
    assert late.peak_memory.tolist() == [10, 10, 10, 10]
    assert [max(curve.total) for curve in late.memory_on("disk")] == [40, 30, 20, 0]
    # With ZeRO, each replica still moves all that its own forwards saved.
    for zero in 0, 1:
        priced = fill_costs(shape, dp=2, zero=zero)
        assert priced.stash == 2.0, (zero, priced.stash)
    text = to_flat_text(program)
    assert_moves_refused(
        text,
        ("unstash 0.0", "B 0.1", "OrderError", "B 0.0", "unstash 0.0"),
        ("unstash 0.0", "stash 0.0", "OrderError", "unstash 0.0", "stash 0.0"),
        ("stash 0.0", "F 0.0", "OrderError", "stash 0.0", "F 0.0"),
        ("unstash 0.0", "", "CompletenessError", "stash 0.0"),
        ("stash 0.0", "", "CompletenessError", "unstash 0.0"),
    )


def judge(folder: str) -> None:
    clipped: Any = partial(schedir.compile, one_f_one_b, PipelineShape(3, 4), clip_grad_norm=True)
    plain, program = clipped(), clipped(judge=True, debug=True)
    assert len(program) == len(plain) + 3
    run = schedir.simulate(program, Costs(F=1, B=2, judge=7))
    assert run.span == schedir.simulate(plain, Costs(F=1, B=2)).span + 7
    check_all_readers(program, "judge", Costs(F=1, B=2, judge=7), folder)
    text = to_flat_text(program)
    late = text.replace("  judge\n  step\n", "  step\n  judge\n", 1)
    assert_refused(late, "OrderError", "step", "judge")
    reduction = "  reduce_grads 0\n"
    early = text.replace("  judge\n", "", 1).replace(reduction, f"  judge\n{reduction}")
    assert_refused(early, "OrderError", "judge", "reduce_grads 0")
    assert_refused(text.replace("  judge\n", "", 1), "ReductionError")
    updates = schedir.compile(
        one_f_one_b, PipelineShape(2, 4, optimizer_steps=2, weight_delay=1), judge=True
    )
    assert to_flat_text(updates).count("judge 1\n") == 2
    # Ranks wait for each other if one of them judges before its norm and the others after it.
    crossed = text.replace("  reduce_norm\n  judge\n", "  judge\n  reduce_norm\n", 1)
    try:
        schedir.check(schedir.from_text(crossed))
    except schedir.errors.DeadlockError as error:
        assert {str(w.instr) for w in error.cycle} == {"judge", "reduce_norm"}
    else:
        raise AssertionError("check does not find the deadlock")


def check_messages_with_sums() -> None:
    """Check messages that no pass inserts: they are complete if each value has a giver."""
    text = to_flat_text(schedir.compile(one_f_one_b, PipelineShape(2, 1)))
    for line, more in (
        ("F 0.0", ["F 0.0", "sum_sent 0.0"]),
        ("send_act 0.0", ["send_act 0.0", "send_sum 0.0"]),
        ("F 1.0", ["recv_sum 1.0", "compare_sum 1.0", "F 1.0"]),
    ):
        text = text.replace(f"  {line}\n", "".join(f"  {each}\n" for each in more))
    schedir.check(schedir.from_text(text))
    assert_moves_refused(
        text,
        ("sum_sent 0.0", "", "CompletenessError", "send_sum 0.0"),
        ("send_sum 0.0", "", "UnmatchedTransferError", "recv_sum 1.0"),
        ("recv_sum 1.0", "", "UnmatchedTransferError", "send_sum 0.0"),
        ("sum_sent 0.0", "step", "OrderError", "send_act 0.0", "sum_sent 0.0"),
    )


def log(folder: str) -> None:
    program = schedir.compile(one_f_one_b, PipelineShape(2, 4), debug=True)
    sizes = Sizes(saved=10, seen=3, mask=1)
    for copy, use in (0.0, 0.0), (0.25, 0.5), (3.0, 0.5), (0.25, 9.0):
        run = schedir.simulate(program, Costs(F=1, B=2, to_host=copy, log=use), sizes=sizes)
        # The logged value and the mask do not add to the microbatches in flight.
        assert run.peak_in_flight.tolist() == [2, 1]
        for tier, begins, ends in ("device", "Forward", "ToHost"), ("host", "ToHost", "Log"):
            for rank, curve in enumerate(run.memory_on(tier)):
                spans = run.spans[run.spans["rank"] == rank]
                start, end = (
                    spans[spans["op"] == schedir.Opcode[name]][side]
                    for name, side in ((begins, "start"), (ends, "end"))
                )
                for time, seen in zip(curve.times, curve.by_kind["seen"], strict=True):
                    assert seen == 3 * ((start <= time) & (end > time)).sum(), (tier, rank, time)
    text = to_flat_text(program)
    assert_moves_refused(
        text,
        ("log 0.1", "to_host 0.1", "OrderError", "log 0.1", "to_host 0.1"),
        ("to_host 0.1", "F 0.1", "OrderError", "to_host 0.1", "F 0.1"),
        ("log 0.1", "", "CompletenessError", "to_host 0.1"),
    )
    check_all_readers(program, "log", Costs(F=1, B=2, to_host=0.25, log=0.5), folder)
    check_messages_with_sums()
    # A row for an activation runs after the scatter at the sender, and after the gather at the
    # receiver. Between the stages of a rank nothing is scattered.
    for tp in 1, 2:
        costs = fill_costs(PipelineShape(2, 8), activation=(8, 6), tp=tp)
        assert (costs.sum_sent, costs.compare_sum) == ((4 / tp, 0), (0, 4)), (tp, costs)
        costs = fill_costs(PipelineShape(2, 1, 2, "vee"), activation=(8, 6, 4, 2), tp=tp)
        assert costs.sum_sent == (4 / tp, 3, 2 / tp, 0), (tp, costs)
    by_microbatch = fill_costs(PipelineShape(2, 2), activation=((8, 6), (0, 0)))
    assert by_microbatch.sum_sent == ((4, 3), (0, 0)), by_microbatch


def tape(folder: str) -> None:
    program = schedir.compile(zb_h1, PipelineShape(3, 5), debug=True)
    sizes = Sizes(saved=10, deferred_wgrad=4, saved_and_deferred=12)
    sizes_of = {  # the change of memory at the start of an instruction, and at its end
        "Forward": (10, 0), "BackwardInput": (12 - 10, 4 - 2 - 10), "OffloadTape": (0, -4),
        "ReloadTape": (4, 0), "BackwardWeight": (0, -4),
    }  # fmt: skip
    for time in 0.25, 3.0:
        run = schedir.simulate(program, Costs(F=1, I=1, W=1, move=time), sizes=sizes)
        for rank, curve in enumerate(run.memory):
            changes = []
            for span in run.spans[run.spans["rank"] == rank]:
                starts, ends = sizes_of.get(schedir.Opcode(span["op"]).name, (0, 0))
                changes += [(span["start"], starts), (span["end"], ends)]
            for moment, total in zip(curve.times, curve.total, strict=True):
                expected = sum(change for when, change in changes if when <= moment)
                assert total == expected, (time, rank, moment, total, expected)
    check_all_readers(program, "offload_tape", Costs(F=1, I=1, W=1, move=0.25), folder)


def clamp(folder: str) -> None:
    program = schedir.compile(interleaved, PipelineShape(2, 4, 2), clip_grad_norm=True, debug=True)
    streams = to_flat_text(program).split("rank 1\n")
    for stage in range(4):  # each stage of a rank needs the norm of the rank
        own = streams[stage % 2].replace(f"  clamp {stage}\n", "")
        own = own.replace("  reduce_norm\n", f"  clamp {stage}\n  reduce_norm\n")
        text = "rank 1\n".join([own, streams[1]] if stage % 2 == 0 else [streams[0], own])
        assert_refused(text, "OrderError", f"clamp {stage}", "reduce_norm")
    check_all_readers(
        schedir.compile(interleaved, PipelineShape(2, 4, 2)), "clamp", Costs(), folder
    )
    # A rank keeps old weights for an instruction that reads them after a step.
    text = to_flat_text(schedir.compile(one_f_one_b, PipelineShape(1, 4, optimizer_steps=2)))
    for before, versions in (("step", 1), ("F 0.2", 2), ("step 1", 2)):
        read = schedir.from_text(text.replace(f"  {before}\n", f"  copy\n  {before}\n"))
        assert schedir.simulate(read).peak_weight_versions.tolist() == [versions], before
    early = text.replace("  F 0.1\n", "  copy 1\n  F 0.1\n")
    assert_refused(early, "OrderError", "copy 1", "step")
    # In a program with one optimizer step, an instruction cannot read old weights.
    text = to_flat_text(schedir.compile(one_f_one_b, PipelineShape(1, 4)))
    schedir.from_text(text.replace("  step\n", "  copy\n  step\n"))
    assert_refused(text.replace("  step\n", "  step\n  copy\n"), "OrderError", "step", "copy")


def check_cluster_refuses_packed_messages(folder: str) -> None:
    """Check that a cluster refuses to price messages whose bytes a form changes."""
    cluster = f"{folder}/node.toml"
    schedir.save_cluster(Cluster(1, 3, flops=1, memory="1GB", hbm_bandwidth=1, nvlink_bandwidth=1,
                                 network_bandwidth=1), cluster)  # fmt: skip
    command = f"simulate one_f_one_b --ranks 3 --microbatches 4 --cluster {cluster} --sizes".split()
    model, costs = "activation=100,params=1,grads=1,optimizer=1", "F=1,B=2"
    packed = f"{model},packed=40"
    for sizes, times, compressed, error in (
        (packed, costs, "yes", "compress changes the bytes of the message to the size packed"),
        (packed, f"{costs},send=1", "yes", ""),
        (model, costs, "yes", ""),
        (packed, costs, "no", ""),
    ):
        with redirect_stderr(StringIO()) as printed:
            main([*command, sizes, "--costs", times, "-O", f"compress={compressed}"])
        message = printed.getvalue()
        assert error in message and bool(error) == bool(message), (sizes, times, compressed)


def compress(folder: str) -> None:
    check_cluster_refuses_packed_messages(folder)
    plain = schedir.compile(one_f_one_b, PipelineShape(3, 4))
    assert schedir.compile(one_f_one_b, PipelineShape(3, 4), compress=False) == plain
    sizes = Sizes(activation=100, packed=40)
    for tp, part in (1, 40), (2, 20):
        compiled: Any = partial(schedir.compile, one_f_one_b, PipelineShape(3, 4), tp=tp)
        split, program = compiled(), compiled(compress=True, debug=True)
        new = [op for op in schedir.Opcode if op.name in ("Compress", "Decompress")]
        # A GPU reads and writes all of an activation, or its part of it.
        assert fill_costs(PipelineShape(3, 4), tp=tp).compress == 8 / tp
        assert not split.used_opcodes & {*new} and {*new} <= program.used_opcodes
        assert len(program) == len(split) + 2 * 4 * 2  # two boundaries, four microbatches
        # Messages have the packed bytes, of which each tensor-parallel rank sends its part.
        sent = count_sent_bytes(program, sizes)[Lane.ACT]
        assert sent.tolist() == [4 * part, 4 * part, 0]
        assert count_sent_bytes(program, Sizes(activation=100))[Lane.ACT][0] == 400 / tp
        run = schedir.simulate(program, Costs(F=1, B=2, compress=0.25))
        assert run.span > schedir.simulate(split, Costs(F=1, B=2)).span
        slots = schedir.simulate(compiled(compress=True, buffer_sharing="minimal"), sizes=sizes)
        assert 0 < float(slots.peak_memory[2]) - 100 <= 400  # received activations are unpacked
        if tp == 2:
            check_all_readers(program, "compress", Costs(F=1, B=2, compress=0.25), folder)
        text = to_flat_text(program)
        maker = "F 0.0" if tp == 1 else "tp_scatter_act 0.0"
        taker = "F 1.0" if tp == 1 else "tp_gather_act 1.0"
        wrong = [
            ("decompress 1.0", "B 1.0", "OrderError", taker, "decompress 1.0"),
            ("decompress 1.0", "F 1.0", "OrderError", taker, "decompress 1.0"),
            ("compress 0.0", "F 0.0", "OrderError", "compress 0.0", maker),
            ("compress 0.0", maker, "OrderError", "compress 0.0", maker),
        ]
        assert_moves_refused(
            text,
            *wrong[:: 1 if tp == 2 else 2],
            ("decompress 1.0", "", "UnmatchedTransferError", "compress 0.0"),
            ("compress 0.0", "", "UnmatchedTransferError", "decompress 1.0"),
        )


if __name__ == "__main__":
    each = (stash, judge, log, tape, clamp, compress)
    checks = {check.__name__: check for check in each}
    *names, folder_name = sys.argv[1:]
    for name in names:
        checks[name](folder_name)
