"""The flags of the command line's verbs, and of jobs."""

import argparse
from pathlib import Path

from osdp_ray.units import parse_bytes


def size(text: str) -> int:
    """An argparse type: a size with its unit."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def build_parser() -> argparse.ArgumentParser:
    """The parser of all verbs."""
    parser = argparse.ArgumentParser(
        prog="osdp", description="The fastest sharded-data-parallel schedule that fits the memory, on Ray."
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="verb")

    discover = verbs.add_parser("discover", help="the devices of a Ray cluster")
    _add_cluster_flags(discover)
    _add_output_flags(discover)

    profile = verbs.add_parser("profile", help="what a workload's operators cost on a cluster")
    _add_workload(profile)
    _add_cluster_flags(profile)
    _add_hardware_flag(profile)
    _add_output_flags(profile)

    plan = verbs.add_parser(
        "plan", help="the fastest plan for a profile and a budget; needs neither torch nor a cluster"
    )
    plan.add_argument(
        "workload", metavar="profile", help="profile.json, as 'osdp profile --out' writes it; a workload with --cluster"
    )
    _add_settings(plan)
    _add_hardware_flag(plan)
    plan.add_argument("--memory-budget", type=size, help="per device, such as 16GiB; default: 90 %% of its memory")
    plan.add_argument("--global-batch", type=int, help="samples per step; default: one micro-batch per rank")
    plan.add_argument("--micro-batch", type=int, help="samples per rank and pass; default: the best one")
    _add_step_flags(plan)
    _add_output_flags(plan)

    explain = verbs.add_parser("explain", help="why a plan is as it is, and what binds it")
    explain.add_argument("plan", help="plan.json, as 'osdp plan --out' writes it")
    explain.add_argument("--profile", help="the profile.json that it was made from; without it, what the plan tells")
    explain.add_argument("--memory", action="store_true", help="the peak of every phase and who holds it")
    explain.add_argument("--json", action="store_true", help="print JSON instead of a table")

    diff = verbs.add_parser("diff", help="what differs between two plans")
    diff.add_argument("first", help="plan.json")
    diff.add_argument("second", help="plan.json")
    diff.add_argument("--json", action="store_true", help="print JSON instead of a table")

    train = verbs.add_parser("train", help="discover, profile, plan, run, watch, and plan again")
    _add_workload(train)
    _add_cluster_flags(train)
    add_train_flags(train)
    train.add_argument("--json", action="store_true", help="print the summary as JSON, and nothing else")

    export = verbs.add_parser("export", help="a save's model as safetensors that from_pretrained reads")
    export.add_argument("save", help="a save, or the folder (or --saves-to) of a run, for its newest one")
    export.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder to write to")
    export.add_argument("--max-file-size", type=size, default=parse_bytes("5GiB"), help="of one file (default: 5GiB)")
    export.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="of the numbers; default: as in the save")
    return parser


def add_train_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of a training run that do not depend on the workload; jobs share them."""
    parser.add_argument("--memory-budget", type=size, help="per device, such as 300MiB; default: 90 %% of its memory")
    parser.add_argument("--global-batch", type=int, default=16, help="samples per optimizer step (default: 16)")
    parser.add_argument("--micro-batch", type=int, help="samples per worker and pass; default: the plan's choice")
    _add_step_flags(parser)
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps (default: 300)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=0, metavar="STEPS", help="0: at the end only (default)")
    parser.add_argument("--keep-saves", type=int, default=2, metavar="N", help="the newest N stay (default: 2)")
    parser.add_argument("--async-saves", action="store_true", help="train on while a save is written from a copy")
    parser.add_argument("--saves-to", default="", metavar="DIR|URL", help="saves go there (s3://, ...), not to --out")
    parser.add_argument("--init-from", default="", metavar="PATH", help="start from safetensors, or a save's model")
    parser.add_argument("--init-partly", action="store_true", help="take those weights only that both sides have")
    parser.add_argument("--resume", action="store_true", help="go on from the newest save in --out")
    parser.add_argument("--compile", action="store_true", help="run blocks through torch.compile")
    parser.add_argument("--max-replans", type=int, default=2, help="0: keep the first plan (default: 2)")
    parser.add_argument("--out", type=Path, default=Path("runs/latest"), help="the run's folder (default: runs/latest)")


def _add_step_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prefetch",
        type=int,
        metavar="N",
        help="units gathered ahead in backward; default: 1, or 0 on CPUs",
    )
    parser.add_argument(
        "--scatter-group",
        choices=("shared", "own"),
        default="shared",
        help="that reduces gradients (default: shared)",
    )


def _add_workload(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("workload", help="'gpt', or package.module:function that returns a Workload")
    _add_settings(parser)


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("settings", nargs="*", metavar="key=value", help="arguments of the workload, such as layers=8")
    parser.add_argument("--precision", choices=("fp32", "bf16"), help="what to compute in; default: the workload's own")
    parser.add_argument(
        "--measure", action="store_true", help="find the bytes by real tensors, for a model that fake ones cannot run"
    )


def _add_cluster_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-workers", type=int, help="one per device; default: all devices of the cluster")
    parser.add_argument("--address", help="of a Ray cluster; default: RAY_ADDRESS, else a Ray of its own")


def _add_hardware_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cluster", metavar="NAME|FILE", help="hardware that is not here: a name of the catalogue, or a YAML file"
    )


def _add_output_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the record as JSON instead of a table")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the record there")
