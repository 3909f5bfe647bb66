"""KernelScratch: what a CPU kernel holds while it runs, where only running it tells."""

import bisect
import dataclasses
import operator


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelScratch:
    """Bytes beyond the inputs and outputs of one operation of a trace: `(micro_batch, bytes)` as measured, ascending.

    Kernels choose them shape by shape, so they follow no affine function of the micro-batch.
    """

    points: tuple[tuple[int, int], ...]

    def num_bytes(self, micro_batch: int) -> int:
        """Between two measured micro-batches the larger of both; above all of them as the last two go on."""
        index = bisect.bisect_left(self.points, micro_batch, key=operator.itemgetter(0))
        if index < len(self.points):
            measured, num_bytes = self.points[index]
            return num_bytes if index == 0 or measured == micro_batch else max(num_bytes, self.points[index - 1][1])
        if len(self.points) < 2:
            return self.points[0][1] if self.points else 0
        (before, before_bytes), (last, last_bytes) = self.points[-2:]
        growth_bytes = max(0, last_bytes - before_bytes)
        return last_bytes + -(-growth_bytes * (micro_batch - last) // (last - before))
