"""The product and the page generators stay within a budget of lines of code, by folder.

`python -m tests.lines_of_code` prints the lines.  Raise a budget only with a reason in the commit,
and lower it when code is deleted.  The whole product is to have 41,500 lines at most.
"""

from tests.lines_of_code import PRODUCT, lines_by_folder
from tests.pure.test_layout import ROOT

BUDGET = {
    "docs": 1_430,
    "kernels": 480,
    "schedir": 1_180,
    "schedir/analysis": 1_990,
    "schedir/checkpoints": 2_150,
    "schedir/commands": 5_780,
    "schedir/compiler": 530,
    "schedir/data": 460,
    "schedir/hang_diagnosis": 2_220,
    "schedir/instrumentation": 560,
    "schedir/io": 2_050,
    "schedir/ir": 4_910,
    "schedir/megatron": 1_170,
    "schedir/models": 1_140,
    "schedir/passes": 2_740,
    "schedir/planner": 5_100,
    "schedir/predict": 1_570,
    "schedir/runtime": 10_140,
    "schedir/schedule_search": 2_920,
    "schedir/schedules": 850,
    "schedir/tensor_parallel": 330,
    "schedir/testing": 1_010,
    "schedir/torch_pipelining": 1_900,
    "schedir/traces": 960,
    "schedir/training": 3_970,
    "schedir/transports": 1_950,
    "schedir/verify": 1_270,
    "viz": 2_560,
}


def test_folders_and_product_are_within_budget() -> None:
    lines = lines_by_folder(ROOT, (*PRODUCT, "docs"))
    assert {*lines} == {*BUDGET}
    too_long = {folder: count for folder, count in lines.items() if count > BUDGET[folder]}
    assert not too_long, f"lines of code of each folder above its budget: {too_long}"
    # A budget far above the number of lines would hide later growth.
    assert sum(BUDGET.values()) <= 1.01 * lines.total()
