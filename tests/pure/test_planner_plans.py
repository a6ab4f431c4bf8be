"""Plans: all that a cluster allows, priced at once as one by one; and what is refused."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedir import Cluster
from schedir.planner import Constants, Model, step
from schedir.planner.choices import asked, choices
from schedir.planner.division import layers_of
from schedir.planner.families import FAMILIES
from schedir.planner.memory import ADAM, by_rank
from schedir.planner.plan import prices

SMALL = Model(layers=12, hidden=1024, heads=16, vocab=51200, sequence=1024)
NODE: dict[str, Any] = {
    "gpus_per_node": 8, "flops": "250TFLOP/s", "memory": "80GB", "hbm": "1.7TB/s",
    "nvlink": "230GB/s", "network": "20GB/s", "latency": "5us", "kernel_us": 8,
}  # fmt: skip


def machine(nodes: int = 1, **other: Any) -> Cluster:
    return Cluster(nodes=nodes, **{**NODE, **other})


models = st.builds(
    lambda heads, width, layers, kv, gated, experts, tied: Model(
        layers=layers, hidden=heads * width, heads=heads, vocab=50304, sequence=1024,
        kv_heads=heads // kv, gated=gated, experts=experts, active=min(experts, 2), tied=tied,
    ),
    st.sampled_from([8, 16]), st.sampled_from([64, 128]), st.integers(4, 14),
    st.sampled_from([1, 2]), st.booleans(), st.sampled_from([1, 4]), st.booleans(),
)  # fmt: skip
EVERY = tuple(FAMILIES)


@settings(max_examples=25)
@given(
    models, st.sampled_from([1, 2, 3]), st.sampled_from([8, 12, 48]),
    st.sampled_from(["tpd", "tdp"]), st.sampled_from(["softmax", "flash"]), st.data(),
)  # fmt: skip
def test_all_plans_at_once_cost_what_each_does_alone(
    model: Model, nodes: int, batch: int, order: Any, attention: Any, data: Any
) -> None:
    cluster = machine(nodes)
    want = asked(schedules=EVERY, order=order, attention=attention, c=(1, 2), e=(1, 2))
    plans = choices(model, cluster, batch, want)
    found = prices(model, cluster, plans, Constants(), ADAM)
    for i in data.draw(st.lists(st.integers(0, len(plans) - 1), min_size=8, max_size=8)):
        choice = plans.choice(model, i)
        assert (choice.gpus, choice.batch) == (cluster.gpus, batch)
        assert sum(layers_of(model, choice)) == model.layers
        alone, among = step(model, cluster, choice, exact=False), found.at(model, cluster, i)
        assert among.step == pytest.approx(alone.step, rel=1e-12)
        assert among.parts == pytest.approx(alone.parts, rel=1e-9, abs=1e-12)
        assert among.memory == pytest.approx(alone.memory, rel=1e-12)
        assert alone.step == pytest.approx(sum(alone.parts)) and min(alone.parts) >= 0
        fullest = max(by_rank(model, cluster, choice), key=lambda rank: rank.total)
        assert alone.memory == pytest.approx(fullest)
