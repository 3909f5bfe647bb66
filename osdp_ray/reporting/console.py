"""What a person sees of a run in a terminal: stages, the plan as a table, a progress bar, the summary.

A Console is an `on_event` of `pipeline.run`. It writes to the streams it is given: tables to `out`, progress to `err`.
"""

from pathlib import Path
from typing import Any, TextIO

from osdp_ray.reporting.progress import ProgressBar
from osdp_ray.units import format_seconds

_STAGES = {"discover": "devices", "profile": "profiling", "plan": "planning", "train": "starting the workers"}


class Console:
    """Shows the events of one run. `num_steps` scales the bar; `run_dir` is named at the end."""

    def __init__(self, *, out: TextIO, err: TextIO, num_steps: int, run_dir: Path) -> None:
        self._out, self._err = out, err
        self._num_steps, self._run_dir = num_steps, run_dir
        self._bar: ProgressBar | None = None
        self._budget_bytes = 0
        self._steps: dict[int, dict[int, Any]] = {}
        self._num_ranks = 0

    def __call__(self, kind: str, facts: dict[str, Any]) -> None:
        show = getattr(self, f"_show_{kind}", None)
        if show is not None:
            show(facts)

    def close(self) -> None:
        """Ends the progress bar's line."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.note(text)
        else:
            self._err.write(f"{text}\n")
            self._err.flush()

    def _tell(self, text: str) -> None:
        self._out.write(f"{text}\n")
        self._out.flush()

    def _show_stage(self, facts: dict[str, Any]) -> None:
        name, seconds = facts["name"], facts["seconds"]
        if seconds is None:
            self._say(f"{_STAGES.get(name, name)} ...")
        elif name != "train":
            self._say(f"{_STAGES.get(name, name)}: {format_seconds(seconds)}")

    def _show_cluster(self, facts: dict[str, Any]) -> None:
        self._num_ranks = facts["cluster"].num_ranks
        self._tell(f"\n{facts['cluster'].table()}\n")

    def _show_profile(self, facts: dict[str, Any]) -> None:
        self._tell(f"\n{facts['profile'].table()}\n")

    def _show_plan(self, facts: dict[str, Any]) -> None:
        self.close()
        plan = facts["plan"]
        self._num_ranks = plan.num_ranks
        self._budget_bytes = plan.budget_bytes
        self._tell(f"\nplan {facts['index']}\n\n{plan.table()}\n")

    def _show_samples(self, facts: dict[str, Any]) -> None:
        """Advances the bar once every rank has told of a step: the slowest counts, and the highest peak."""
        if self._bar is None:
            self._bar = ProgressBar(self._err, self._num_steps, self._budget_bytes)
        for sample in facts["samples"]:
            ranks = self._steps.setdefault(sample.step, {})
            ranks[sample.rank] = sample
            if len(ranks) == self._num_ranks:
                del self._steps[sample.step]
                peaks = [one.peak_bytes for one in ranks.values() if one.peak_bytes is not None]
                self._bar.update(
                    step=sample.step,
                    loss=sample.loss,
                    num_samples=sample.num_samples,
                    step_s=max(one.step_s for one in ranks.values()),
                    peak_bytes=max(peaks, default=None),
                )

    def _show_saved(self, facts: dict[str, Any]) -> None:
        self._say(f"saved {facts['path']}")

    def _show_save_failed(self, facts: dict[str, Any]) -> None:
        self._say(f"NOT SAVED at step {facts['step']}, training goes on: {facts['problem']}")

    def _show_eval(self, facts: dict[str, Any]) -> None:
        self._say(f"held-out loss {facts['loss']:.4f} after step {facts['step']}")

    def _show_replan(self, facts: dict[str, Any]) -> None:
        self._say(f"planning again: {facts['reason']}")

    def _show_done(self, facts: dict[str, Any]) -> None:
        self.close()
        self._tell(f"\n{facts['summary'].table()}\n\nreport: {self._run_dir / 'summary.json'}")
