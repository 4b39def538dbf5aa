"""Helpers for tests of the simulator: a small invented device, and a run on it."""

from holdfast.core.cost import CostModel
from holdfast.engine.profiles import CostProfile
from holdfast.lab.simulator.run import simulate
from holdfast.lm.config import EngineConfig

COST = CostModel(
    model="m",
    device="d",
    linear_tokens=(1, 64, 1024),
    linear_seconds=(0.004, 0.005, 0.020),
    attention_queries=(1, 1024),
    attention_contexts=(64, 1024),
    attention_seconds=((0.00001, 0.0001), (0.0005, 0.008)),
)
PROFILE = CostProfile(cost=COST, dtype="float32", cache_tokens=8192, max_model_len=2048, token_budget=256, tile=16)


def run(workload, *, config=None, profile=PROFILE, **options):
    return simulate(EngineConfig(**{"max_sequences": 16, **(config or {})}), profile, workload, **options)
