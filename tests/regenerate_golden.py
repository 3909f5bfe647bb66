"""Rewrites tests/golden: `python -m tests.regenerate_golden` the plans, with `--profile` the profile first.

Run it when a change of the planner or the cost model is meant to change plans, and commit the difference with it.
The profile is a real trace of the built-in GPT with round seconds made by hand; it changes only with the trace.
"""

import sys
from pathlib import Path

from osdp_ray.planning import plan
from osdp_ray.records.plan import Plan
from osdp_ray.records.profile import Profile
from osdp_ray.schema import write_json
from osdp_ray.units import MIB

FOLDER = Path(__file__).parent / "golden"
PROFILE = FOLDER / "profile-gpt-4x128.json"
BUDGETS_MIB = (12, 20, 32)
GLOBAL_BATCH = 16


def golden_path(budget_mib: int) -> Path:
    return FOLDER / f"plan-gpt-4x128-{budget_mib}mib.json"


def golden_plan(profile: Profile, budget_mib: int) -> Plan:
    return plan(profile, budget_bytes=budget_mib * MIB, global_batch=GLOBAL_BATCH)


def what_is_golden(made: Plan) -> dict[str, object]:
    """Decisions, prediction and alternatives; how the solver got there may differ between machines."""
    values = made.to_json()
    del values["solver"]
    return values


def main(arguments: list[str]) -> None:
    if "--profile" in arguments:
        from osdp_ray.profiling.trace import trace
        from osdp_ray.workloads.gpt import gpt
        from tests.oracle import traced_profile

        workload = gpt(layers=4, hidden=128, heads=4, sequence=128)
        traced_profile(workload, trace(workload), ranks_per_node=(4,)).save(PROFILE)
    profile = Profile.load(PROFILE)
    for budget_mib in BUDGETS_MIB:
        write_json(golden_path(budget_mib), what_is_golden(golden_plan(profile, budget_mib)))


if __name__ == "__main__":
    main(sys.argv[1:])
