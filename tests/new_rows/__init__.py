"""New instructions, each as a row, a pass and a handler that are added to a copy of the tree.

    stash       a move on lanes of its own: saved activations go to the disk and come back
    judge       a collective: all ranks decide together whether the gradients are finite
    compress    a form: activations are sent in fewer bytes

Three more are checked without a run, and have no handlers:

    log         a second value of a forward, which is moved to the host, and read and freed there;
                and a message with the sum of each activation
    tape        deferred weight gradients that are moved to the host and back
    clamp       a change of each stage's gradient, and an instruction that only reads weights

Each one consists of `EDITS` of `ir/isa/opcodes.py` and `ir/isa/instruction_table.py`, the file of a
pass (`*_pass.py`), and the file of its handlers (`*_handlers.py`).
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from schedir.ir.isa.opcodes import Form, Lane, Opcode, Value

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
PRODUCT = ("schedir", "kernels", "viz")

_LAST = {each: [*each][-1] for each in (Opcode, Value, Lane, Form)}
_OPCODES, _VALUES, _LANES, _FORMS = (f"    {last.name} = {last}\n" for last in _LAST.values())
_VALUE_ROWS = f"    ValueRow(\n        _V.{_LAST[Value].name}, "
_LANE_ROWS = f"    LaneRow(_L.{_LAST[Lane].name}, "
_FORM_ROWS = f"    FormRow(Form.{_LAST[Form].name}, "
_INSTRUCTION_ROWS = f"    Row(\n        _O.{_LAST[Opcode].name}, "

# By instruction, pairs of an anchor and a text, for `opcodes.py` and `instruction_table.py`. The
# text is inserted after the list that contains the anchor. If the anchor begins with "=", the text
# replaces the rest of the anchor. {next}, {value}, {lane} and {form} become the next free numbers
# of opcodes, values, lanes and forms.
EDITS: dict[str, list[tuple[str, str]]] = {
    "stash": [
        (_OPCODES, "    Stash = {next}\n    Unstash = {next}\n"),
        (_LANES, "    TO_DISK = {lane}\n    FROM_DISK = {lane}\n"),
        (_LANE_ROWS, """\
    LaneRow(_L.TO_DISK, False, "starts", "copies to the disk, without the host"),
    LaneRow(_L.FROM_DISK, False, "starts", "copies from the disk, without the host"),
"""),
        (_INSTRUCTION_ROWS, """\
    Row(_O.Stash, "stash", _L.TO_DISK, _MB, (_V.SAVED,), (_V.SAVED,), (),
        "Moves saved activations to the disk.", cost="stash",
        changes=(Change(_V.SAVED, "device", "disk"),), traffic=Traffic("disk", ("saved",))),
    Row(_O.Unstash, "unstash", _L.FROM_DISK, _MB, (_V.SAVED,), (_V.SAVED,), (),
        "Moves saved activations back.", cost="stash",
        changes=(Change(_V.SAVED, "disk", "device"),), traffic=Traffic("disk", ("saved",))),
"""),
    ],
    "judge": [
        (_OPCODES, "    Judge = {next}\n"),
        (_VALUES, "    VERDICT = {value}\n"),
        (_VALUE_ROWS, '    ValueRow(_V.VERDICT, _RANK, _ALL, "the verdict"),\n'),
        ('="step", _L.COMPUTE, _RANK,\n        needs=(\n            ',
         '"step", _L.COMPUTE, _RANK,\n        needs=(\n            _V.VERDICT, '),
        (_INSTRUCTION_ROWS, """\
    Row(_O.Judge, "judge", _L.DP, _RANK, (_V.GRAD,), (_V.VERDICT,), (),
        "Sums the number of gradients that are not finite over all ranks.", cost="judge",
        partner=_O.Judge, group="model", host_sync="always"),
"""),
    ],
    "compress": [
        (_OPCODES, "    Compress = {next}\n    Decompress = {next}\n"),
        (_FORMS, "    PACKED = {form}\n"),
        (_FORM_ROWS, '    FormRow(Form.PACKED, "the value in fewer bytes", size="packed"),\n'),
        (_INSTRUCTION_ROWS, """\
    Row(_O.Compress, "compress", _L.COMPUTE, _MB, (_V.ACT_OUT,), (_V.ACT_OUT,), (),
        "Packs an activation.", cost="compress", form=Form.PACKED,
        traffic=Traffic("hbm", moves_per_byte=2)),
    Row(_O.Decompress, "decompress", _L.COMPUTE, _MB, (_V.ACT_IN,), (_V.ACT_IN,), (),
        "Unpacks it.", cost="compress", form=Form.PACKED,
        traffic=Traffic("hbm", moves_per_byte=2)),
"""),
    ],
}  # fmt: skip
EDITS_WITHOUT_HANDLERS: dict[str, list[tuple[str, str]]] = {
    "log": [
        (_OPCODES, "    ToHost = {next}\n    Log = {next}\n"),
        (_OPCODES, "    SumSent = {next}\n    SendSum = {next}\n    RecvSum = {next}\n"),
        (_OPCODES, "    CompareSum = {next}\n"),
        (_VALUES, "    SEEN = {value}\n    MASK = {value}\n"),
        (_VALUES, "    SUM_OUT = {value}\n    SUM_IN = {value}\n"),
        (_VALUE_ROWS, """\
    ValueRow(_V.SEEN, _MB, _ONCE, "the logged value", "seen"),
    ValueRow(_V.MASK, _MB, _ONCE, "the mask", "mask"),
    ValueRow(_V.SUM_OUT, _MB, _ONCE, "the sum", "sum", peer=PeerRule.NEXT, is_optional=True),
    ValueRow(_V.SUM_IN, _MB, _ONCE, "the sum", "sum", peer=PeerRule.PREVIOUS,
             local_source=_V.SUM_OUT, is_optional=True),
"""),
        (_LANES, "    COPY = {lane}\n    NOTES = {lane}\n"),
        (_LANE_ROWS, """\
    LaneRow(_L.COPY, False, "starts", "copies to the host"),
    LaneRow(_L.NOTES, False, "starts", "work of the host"),
"""),
        ("=gives=(_V.ACT_OUT, _V.SAVED, _V.SKIP_OUT),",
         "gives=(_V.ACT_OUT, _V.SAVED, _V.SKIP_OUT, _V.SEEN, _V.MASK),"),
        ("=gives=(_V.GRAD_OUT, _V.WGRAD, _V.SKIP_GRAD_OUT),\n        frees=(_V.SAVED, ",
         "gives=(_V.GRAD_OUT, _V.WGRAD, _V.SKIP_GRAD_OUT),\n        frees=(_V.MASK, _V.SAVED, "),
        ('="B", _L.COMPUTE, _MB,\n        needs=(',
         '"B", _L.COMPUTE, _MB,\n        needs=(_V.MASK, '),
        (_INSTRUCTION_ROWS, """\
    Row(_O.ToHost, "to_host", _L.COPY, _MB, (_V.SEEN,), (_V.SEEN,), (),
        "Moves the logged value to the host.", cost="to_host",
        changes=(Change(_V.SEEN, "device", "host"),)),
    Row(_O.Log, "log", _L.NOTES, _MB, (_V.SEEN,), (), (_V.SEEN,), "Logs it.", cost="log",
        changes=(Change(_V.SEEN, "host", "host"),)),
    Row(_O.SumSent, "sum_sent", _L.COMPUTE, _MB, (_V.ACT_OUT,), (_V.ACT_OUT, _V.SUM_OUT), (),
        "Sums an activation that is sent.", cost="sum_sent",
        traffic=Traffic("hbm", ("activation",))),
    Row(_O.SendSum, "send_sum", _L.ACT, _MB, (_V.SUM_OUT,), (), (_V.SUM_OUT,), "Sends the sum.",
        cost="send_sum", peer=PeerRule.NEXT, partner=_O.RecvSum),
    Row(_O.RecvSum, "recv_sum", _L.ACT, _MB, (), (_V.SUM_IN,), (), "Receives the sum.",
        peer=PeerRule.PREVIOUS, partner=_O.SendSum),
    Row(_O.CompareSum, "compare_sum", _L.COMPUTE, _MB, (_V.ACT_IN, _V.SUM_IN), (_V.ACT_IN,),
        (_V.SUM_IN,), "Compares the sum of a received activation.", cost="compare_sum",
        traffic=Traffic("hbm", ("activation",))),
"""),
    ],
    "tape": [
        (_OPCODES, "    OffloadTape = {next}\n    ReloadTape = {next}\n"),
        (_LANES, "    TAPES = {lane}\n"),
        (_LANE_ROWS, '    LaneRow(_L.TAPES, False, "starts", "copies of deferred gradients"),\n'),
        (_INSTRUCTION_ROWS, """\
    Row(_O.OffloadTape, "offload_tape", _L.TAPES, _MB, (_V.DEFERRED_WGRAD,), (_V.DEFERRED_WGRAD,),
        (),
        "Moves deferred weight gradients to the host.", cost="move",
        changes=(Change(_V.DEFERRED_WGRAD, "device", "host"),)),
    Row(_O.ReloadTape, "reload_tape", _L.TAPES, _MB, (_V.DEFERRED_WGRAD,), (_V.DEFERRED_WGRAD,), (),
        "Moves them back.", cost="move", changes=(Change(_V.DEFERRED_WGRAD, "host", "device"),)),
"""),
    ],
    "clamp": [
        (_OPCODES, "    Clamp = {next}\n    Copy = {next}\n"),
        (_VALUES, "    CLAMPED = {value}\n"),
        (_VALUE_ROWS, '    ValueRow(_V.CLAMPED, _STAGE, _ALL, "the clamped gradient"),\n'),
        ("=_V.GRAD, _V.NORM, _V.SHARDED_PARAMS, _V.SNAPSHOT,",
         "_V.CLAMPED, _V.SHARDED_PARAMS, _V.SNAPSHOT,"),
        ("=gives=(_V.PARAMS, _V.LOCAL_NORM),\n        frees=(_V.GRAD, _V.NORM),",
         "gives=(_V.PARAMS, _V.LOCAL_NORM),\n        frees=(_V.CLAMPED,),"),
        (_INSTRUCTION_ROWS, """\
    Row(_O.Clamp, "clamp", _L.COMPUTE, _STAGE, (_V.GRAD, _V.NORM), (_V.CLAMPED,),
        (_V.GRAD, _V.NORM), "Clamps a stage's gradient.", cost="clamp"),
    Row(_O.Copy, "copy", _L.COMPUTE, _RANK, (_V.PARAMS,), (), (),
        "Copies the weights at the start of an update."),
"""),
    ],
}  # fmt: skip


# The new instructions that the imported tree has.
NEW = {
    Opcode[name]
    for edits in (EDITS | EDITS_WITHOUT_HANDLERS).values()
    for _, what in edits
    for name in re.findall(r"(\w+) = \{next\}", what)
    if name in Opcode.__members__
}


def copy_folders(folder: Path, *sources: str) -> None:
    """Copy folders of the tree with their compiled modules, which are valid in the copy.

    The names of compiled modules that Python is writing end with a number.
    """
    for source in sources:
        shutil.copytree(ROOT / source, folder / source, symlinks=True,
                        ignore=shutil.ignore_patterns("*.pyc.*"))  # fmt: skip


def copy_tree(folder: Path, *names: str) -> Path:
    """Copy the product and the tests, and add new instructions to the copy.

    Args:
        folder: The folder of the copy.
        *names: The names of the instructions.

    Returns:
        The folder.
    """
    copy_folders(folder, *PRODUCT, "tests")
    files = [folder / "schedir/ir/isa" / name for name in ("opcodes.py", "instruction_table.py")]
    texts = [file.read_text() for file in files]
    numbers = dict(zip(("next", "value", "lane", "form"), map(len, _LAST), strict=True))
    for name in names:
        for anchor, text in (EDITS | EDITS_WITHOUT_HANDLERS)[name]:
            for key in numbers:
                while f"{{{key}}}" in text:
                    text = text.replace(f"{{{key}}}", str(numbers[key]), 1)
                    numbers[key] += 1
            if anchor.startswith("="):
                old = anchor[1:]
            else:
                old = _find_rest_of_list(next(each for each in texts if anchor in each), anchor)
                text = old + text
            (k,) = (k for k, each in enumerate(texts) if old in each)
            assert texts[k].count(old) == 1, (name, old)
            texts[k] = texts[k].replace(old, text)
    for file, text in zip(files, texts, strict=True):
        file.write_text(text)
    for name in names:
        shutil.copy(HERE / f"{name}_pass.py", folder / "schedir" / "passes" / f"{name}.py")
        if name in EDITS:
            shutil.copy(HERE / f"{name}_handlers.py", folder / "schedir/runtime/handlers")
    return folder


def _find_rest_of_list(text: str, anchor: str) -> str:
    """Return the lines from an anchor to the end of its list, whose lines are indented."""
    rest = text[text.index(anchor) :].split("\n")
    end = next(k for k, line in enumerate(rest) if not line.startswith("    "))
    return "\n".join(rest[:end]) + "\n"
