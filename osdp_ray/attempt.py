"""What one attempt has measured so far, and when it is time to think about another plan."""

import time
from collections.abc import Callable, Sequence

from osdp_ray.records.telemetry import Sample, Telemetry

_DRIFT_CHECK_S = 5.0


class Attempt:
    """The samples of the attempt that runs. `setup_s` is from its start to the first sample."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.setup_s = 0.0
        self._start_s = self._checked_s = time.monotonic()
        self._num_thought_of = 0

    @property
    def telemetry(self) -> Telemetry:
        return Telemetry(samples=tuple(self.samples))

    def add(self, samples: Sequence[Sample]) -> None:
        if samples and not self.samples:
            self.setup_s = time.monotonic() - self._start_s
        self.samples += samples

    def is_time_to_think(self, num_ranks: int, has_drifted: Callable[[Telemetry], bool]) -> bool:
        """Once when every rank has a measured peak; later when something drifts and half of the samples are new.

        So what led to nothing once is thought of again only with twice the evidence, and never in a hurry.
        """
        num_samples = len(self.samples)
        if self._num_thought_of == 0:
            measured = {sample.rank for sample in self.samples if sample.peak_bytes is not None}
            is_time = len(measured) == num_ranks
        else:
            is_due = time.monotonic() - self._checked_s >= _DRIFT_CHECK_S
            if is_due:
                self._checked_s = time.monotonic()
            is_time = is_due and num_samples >= 2 * self._num_thought_of and has_drifted(self.telemetry)
        if is_time:
            self._num_thought_of = num_samples
        return is_time
