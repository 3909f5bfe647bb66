"""Going on with the run in a directory: which plan, profile and save of it are to be taken, and whether they fit."""

import dataclasses
from pathlib import Path

from osdp_ray.errors import PlanMismatchError, RecordError, UsageError
from osdp_ray.execution import latest_save, read_save
from osdp_ray.records.cluster import Cluster
from osdp_ray.records.plan import Plan
from osdp_ray.records.profile import Profile
from osdp_ray.records.telemetry import Sample
from osdp_ray.run_directory import RunDirectory
from osdp_ray.settings import Settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Earlier:
    """What a run to go on with left behind: its newest plan and its number, its newest save, the save's step and the
    samples in it."""

    index: int
    plan: Plan
    save: Path | str | None = None
    step: int = 0
    samples: tuple[Sample, ...] = ()


def find_earlier(directory: RunDirectory, workload_hash: str, settings: Settings) -> Earlier:
    """The run in a directory. Raises UsageError where there is none, or it is another's, or it is complete."""
    index, plan = directory.newest_plan()
    where = directory.path
    if plan.workload_hash != workload_hash:
        raise UsageError(
            f"{where} holds a run of workload {plan.workload!r} with hash {plan.workload_hash}, and this one's is "
            f"{workload_hash}. Resume with the same model and data settings, or give another --out."
        )
    save = latest_save(settings.options.saves_to or where)
    if save is None:
        return Earlier(index=index, plan=plan)
    saved, options = read_save(save), settings.options
    for flag, was, now in (
        ("--seed", saved.seed, options.seed),
        ("--global-batch", saved.global_batch, settings.global_batch),
    ):
        if was != now:
            raise UsageError(f"the run in {where} has {flag} {was}, not {now}. Give {flag} {was}, or another --out.")
    if saved.step >= options.num_steps:
        raise UsageError(
            f"the run in {where} is complete: {saved.step} of {options.num_steps} steps are done. "
            "Raise --steps to train on, or give another --out."
        )
    return Earlier(index=index, plan=plan, save=save, step=saved.step, samples=saved.samples)


def reusable_profile(directory: RunDirectory, plan: Plan, cluster: Cluster, settings: Settings) -> Profile | None:
    """The profile of an earlier plan where that plan can go on: the same world and wishes, and a profile that fits.

    None where any of it differs, or where the profile's file is missing, unreadable, or of another plan.
    """
    if not (
        plan.ranks_per_node == cluster.ranks_per_node
        and plan.global_batch == settings.global_batch
        and settings.micro_batch in (None, plan.micro_batch)
        and settings.prefetch in (None, plan.prefetch)
        and settings.scatter_group == plan.scatter_group
        and settings.budget_bytes in (None, plan.budget_bytes)
    ):
        return None
    try:
        profile = Profile.load(directory.path / "profile.json")
        plan.require_profile(profile)
    except (RecordError, PlanMismatchError):
        return None
    return profile if profile.device_kind == cluster.device_kind else None


def kept_profile(directory: RunDirectory, plan: Plan, cluster: Cluster) -> Profile | None:
    """The profile of an earlier plan where it was measured on this very hardware: it need not be measured again.

    None where it was not, or where the profile's file is missing, unreadable, or of another plan.
    """
    try:
        profile = Profile.load(directory.path / "profile.json")
        plan.require_profile(profile)
    except (RecordError, PlanMismatchError):
        return None
    if profile.cluster_hash != cluster.hash() or profile.device_kind != cluster.device_kind:
        return None
    return dataclasses.replace(profile, device_memory_bytes=cluster.smallest_memory_bytes)


def require_no_saves(saves_to: str) -> None:
    """Raises UsageError if the place for a new run's saves holds those of another."""
    if saves_to and (save := latest_save(saves_to)) is not None:
        raise UsageError(
            f"{saves_to} holds a save of another run ({save}). Go on with it by --resume, or give another --saves-to."
        )
