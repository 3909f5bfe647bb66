"""Trains a byte-level GPT on text under a memory budget: `python jobs/train_gpt.py --memory-budget 24MiB`.

Runs on a Ray of its own, on a cluster with --address, and under `ray job submit -- python jobs/train_gpt.py ...`.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from osdp_ray.cli import add_train_flags, guarded, train


def build_parser() -> argparse.ArgumentParser:
    """The job's flags."""
    parser = argparse.ArgumentParser(description="Train a byte-level GPT on text under a memory budget.")
    parser.add_argument("--data", default="", help="a file, a folder or Parquet; default: Python's own source")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--seq", type=int, default=128, help="bytes per sample (default: 128)")
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate (default: 0.001)")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="what to compute in")
    parser.add_argument("--num-workers", type=int, default=2, help="one per device (default: 2)")
    parser.add_argument("--address", help="of a Ray cluster; default: RAY_ADDRESS, else a Ray of its own")
    add_train_flags(parser)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Trains, and compares the held-out loss with the entropy of the text's bytes."""
    options = build_parser().parse_args(arguments)

    def work() -> int:
        from osdp_ray.workloads.gpt import gpt

        workload = gpt(
            layers=options.layers,
            hidden=options.hidden,
            heads=options.heads,
            sequence=options.seq,
            data=options.data,
            learning_rate=options.lr,
        )
        workload.precision = options.precision
        summary = train(workload, options)
        entropy = workload.unigram_entropy_nats()
        if summary.eval_loss is not None:
            bits = summary.eval_loss / 0.6931471805599453
            print(
                f"held-out loss {summary.eval_loss:.4f} nats per byte ({bits:.3f} bits); "
                f"unigram entropy of the held-out text {entropy:.4f} nats"
            )
        return 0

    return guarded(work)


if __name__ == "__main__":
    sys.exit(main())
