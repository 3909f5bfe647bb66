"""Profile: what the operators of a model cost on a cluster.

The model is a row of sections in the order of execution: `stem` (what runs before the first block), the blocks, and
`head` (what runs after the last one, the loss included). Sections of the same structure share a SectionClass. A class
owns operators (modules that own parameters) and, per way to recompute, a trace: its allocator events in one forward
and backward, each size an affine function of the micro-batch. `costs.simulate_bytes` plays a whole step from them.
"""

import dataclasses
from typing import Literal

from osdp_ray.records.links import Collective, GroupKind, LinkCost
from osdp_ray.records.nodes import NodeSpeed, node_table, slow_nodes
from osdp_ray.records.overheads import NO_PASS_OVERHEAD, PassOverhead, UnitOverhead
from osdp_ray.records.scratch import KernelScratch
from osdp_ray.schema import Record, format_table, record
from osdp_ray.units import format_bytes, format_seconds

Recompute = Literal["none", "selective", "full"]
DeviceKind = Literal["cuda", "cpu"]
Precision = Literal["fp32", "bf16"]  # bf16: parameters stay as they are, computed with in bf16, reduced in fp32

# Codes of a trace's events; see SectionTrace.
ALLOC, FREE, ENTER, EXIT, PRE_BACKWARD, POST_BACKWARD, GRADIENT, WORKSPACE, HOLD = range(9)
SECTION, ROOT = -1, -2  # subjects of hooks that are no operator: the section's own module, the model
FOREIGN = 1000  # subject of a hook or parameter of another class: FOREIGN * (class index + 1) + index


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter tensor. `name` is relative to its section.

    `requires_grad`: it gets a gradient. One that no loss reaches gets none, though it is not frozen. `scratch_bytes`:
    what drawing its first values holds beside its shard, 0 where that goes chunk by chunk.
    """

    name: str
    shape: tuple[int, ...]
    itemsize_bytes: int
    requires_grad: bool
    scratch_bytes: int = 0

    @property
    def numel(self) -> int:
        numel = 1
        for extent in self.shape:
            numel *= extent
        return numel

    @property
    def num_bytes(self) -> int:
        return self.numel * self.itemsize_bytes

    def shard_bytes(self, num_shards: int) -> int:
        """Bytes of one rank's shard, split along the first dimension and padded to the largest shard."""
        if not self.shape:
            return self.itemsize_bytes
        rows = -(-self.shape[0] // num_shards)
        return rows * (self.num_bytes // self.shape[0]) if self.shape[0] else 0

    def local_bytes(self, num_shards: int, index: int) -> int:
        """Bytes of one rank's shard without padding: torch's chunks of the first dimension, the last ones smaller."""
        if not self.shape or not self.shape[0]:
            return self.shard_bytes(num_shards)
        rows = -(-self.shape[0] // num_shards)
        return max(0, min(rows, self.shape[0] - index * rows)) * (self.num_bytes // self.shape[0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operator:
    """A module that owns parameters: the smallest thing that has a choice. Names are relative to its section.

    `modules` holds more than one name where modules share a parameter (tied weights) and must share the choice.
    `can_split`: it is of a kind that runs as slices, and nobody but itself reads its weight.
    """

    name: str
    kind: str
    modules: tuple[str, ...]
    parameters: tuple[int, ...]
    buffer_bytes: int
    can_split: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class SectionClass:
    """Structure shared by sections: the same modules, shapes and dtypes. `parameters` is what operators index into."""

    name: str
    is_block: bool
    operators: tuple[Operator, ...]
    parameters: tuple[Parameter, ...]

    @property
    def parameter_bytes(self) -> int:
        return sum(parameter.num_bytes for parameter in self.parameters)

    def operator_bytes(self, operator: int) -> int:
        return sum(self.parameters[index].num_bytes for index in self.operators[operator].parameters)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """One stretch of the model in the order of execution. `name` is the block's module path, or 'stem', 'head'."""

    name: str
    class_index: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class SectionTrace:
    """Allocator events of one forward and one backward of a section of a class, in order.

    `forward` and `backward` are flat rows of five integers: `code, subject, buffer, constant_bytes, bytes_per_sample`.

    ALLOC, FREE     of a buffer; sizes stand at ALLOC
    HOLD            one more holder of a buffer: a block holds on to its inputs, what called it to its outputs, each
                    until a FREE of its own; the last one frees the buffer
    ENTER, EXIT     of a module's forward, PRE_BACKWARD, POST_BACKWARD of its backward, where FSDP2's hooks run;
                    `subject` is an operator's index, SECTION or ROOT
    GRADIENT        the buffer now holds the gradient of the parameter `subject`, and FSDP2 decides when it is freed
    WORKSPACE       allocated and freed inside one operation; `subject` is 0, or n where its bytes are those of the
                    profile's n-th `scratch`

    Own buffers count from 0. `-(2 k + 1)` is the k-th of the previous section's `outputs`, `-(2 k + 2)` the k-th of
    the next section's `gradient_outputs`. `outputs` are buffers of the forward that a later section holds or frees,
    `gradient_outputs` those of the backward that an earlier section frees; both may hand on what they were given.
    """

    class_index: int
    recompute: Recompute
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    outputs: tuple[int, ...]
    gradient_outputs: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerCost:
    """What the optimizer's step holds and takes, measured on small parameters.

    State is `state_bytes_per_byte` times a parameter's bytes plus `state_bytes_per_tensor`. While stepping it holds
    `step_bytes_per_largest` times the bytes of the largest local parameter and `step_bytes_per_total` times all of
    them. `step_s_per_byte` is seconds per local parameter byte; `step_constant_s` is what ends every step whatever
    its parameters: the ranks' agreement on it, and the optimizer's own frame.
    """

    state_bytes_per_byte: float
    state_bytes_per_tensor: int
    step_bytes_per_largest: float
    step_bytes_per_total: float
    step_s_per_byte: float
    step_s_per_tensor: float
    step_constant_s: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComputeCost:
    """Seconds of a class's forward and backward: `constant_s + micro_batch * s_per_sample`.

    Recomputation comes on top of backward: `selective` and `full` as measured; where `full` was not, a forward again.
    """

    class_index: int
    forward_constant_s: float
    forward_s_per_sample: float
    backward_constant_s: float
    backward_s_per_sample: float
    selective_constant_s: float
    selective_s_per_sample: float
    full_constant_s: float | None = None
    full_s_per_sample: float | None = None

    def recompute_s(self, recompute: Recompute, micro_batch: int) -> float:
        if recompute == "none":
            return 0.0
        if recompute == "selective":
            return self.selective_constant_s + self.selective_s_per_sample * micro_batch
        if self.full_constant_s is None or self.full_s_per_sample is None:
            return self.forward_s(micro_batch)
        return self.full_constant_s + self.full_s_per_sample * micro_batch

    def forward_s(self, micro_batch: int) -> float:
        return self.forward_constant_s + self.forward_s_per_sample * micro_batch

    def backward_s(self, micro_batch: int) -> float:
        return self.backward_constant_s + self.backward_s_per_sample * micro_batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """What telemetry taught about a profile's predictions: 0 and 1 before any.

    `reserved_fraction` is what a caching allocator reserves beyond what tensors hold at their peak; before telemetry
    it is RESERVED_START_FRACTION where there is such an allocator.
    """

    peak_offset_bytes: int = 0
    reserved_fraction: float = 0.0
    compute_factor: float = 1.0
    communication_factor: float = 1.0


# An assumption, until a run's telemetry replaces it: what fragmentation makes CUDA's caching allocator reserve on top.
RESERVED_START_FRACTION = 0.05


def start_calibration(device_kind: DeviceKind) -> Calibration:
    """What is assumed before any telemetry."""
    return Calibration(reserved_fraction=RESERVED_START_FRACTION if device_kind == "cuda" else 0.0)


@record("profile", version=4)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile(Record):
    """Everything `plan` needs to know of a model on a cluster.

    `evaluation` are traces of forward passes without gradients, one per class. `alone` and `alone_evaluation` are those
    of micro-batch 1 that differ from what the others say of it. `overlaps`: its backend communicates
    beside computation (streams), where gloo on CPUs takes turns with it; computing beside a collective then takes
    `1 + overlap_slowdown_fraction` times as long (0 in an estimate). `context_bytes` and
    `communicator_bytes` are what the process holds of a device outside the allocator of tensors: driver, kernels and
    libraries; NCCL's buffers. `buffer_scratch_bytes` is the most that is held beside a buffer of the model while it is
    filled. `scratch` is what kernels hold that had to be run to know; WORKSPACE events count them from 1.
    `unit_overheads` is empty where a GPU computes: the hooks run ahead of it. `nodes` and `cluster_hash` are
    empty in an estimate.
    """

    workload: str
    workload_hash: str
    device_kind: DeviceKind
    backend: Literal["nccl", "gloo", "fake"]
    device_memory_bytes: int
    ranks_per_node: tuple[int, ...]
    precision: Precision
    classes: tuple[SectionClass, ...]
    sections: tuple[Section, ...]
    traces: tuple[SectionTrace, ...]
    batch_bytes_per_sample: int
    buffer_bytes: int
    optimizer: OptimizerCost
    compute: tuple[ComputeCost, ...]
    links: tuple[LinkCost, ...]
    copy_bytes_per_s: float
    calibration: Calibration
    alone: tuple[SectionTrace, ...] = ()
    alone_evaluation: tuple[SectionTrace, ...] = ()
    overlaps: bool = False
    overlap_slowdown_fraction: float = 0.0
    evaluation: tuple[SectionTrace, ...] = ()
    context_bytes: int = 0
    communicator_bytes: int = 0
    buffer_scratch_bytes: int = 0
    scratch: tuple[KernelScratch, ...] = ()
    unit_overheads: tuple[UnitOverhead, ...] = ()
    pass_overhead: PassOverhead = NO_PASS_OVERHEAD
    nodes: tuple[NodeSpeed, ...] = ()
    cluster_hash: str = ""

    @property
    def num_ranks(self) -> int:
        return sum(self.ranks_per_node)

    @property
    def parameter_counts(self) -> tuple[int, ...]:
        """Elements of every section's parameters; one that several sections share is the first one's."""
        of_class = [sum(parameter.numel for parameter in found.parameters) for found in self.classes]
        return tuple(of_class[section.class_index] for section in self.sections)

    @property
    def default_prefetch(self) -> int:
        """Units that a plan gathers ahead in backward: FSDP2's one where computing hides it, else none."""
        return 1 if self.overlaps else 0

    def link(self, group: GroupKind, collective: Collective) -> LinkCost:
        return next(link for link in self.links if link.group == group and link.collective == collective)

    def trace(self, class_index: int, recompute: Recompute) -> SectionTrace:
        return next(t for t in self.traces if t.class_index == class_index and t.recompute == recompute)

    def table(self) -> str:
        """The profile for a terminal: a line per section class, then a line per measured link."""
        counts = [sum(section.class_index == index for section in self.sections) for index in range(len(self.classes))]
        rows = []
        for index, section_class in enumerate(self.classes):
            cost = self.compute[index]
            rows.append(
                (
                    section_class.name,
                    str(counts[index]),
                    str(len(section_class.operators)),
                    format_bytes(section_class.parameter_bytes),
                    format_seconds(cost.forward_s(1)),
                    format_seconds(cost.backward_s(1)),
                    format_seconds(cost.forward_s_per_sample),
                    format_seconds(cost.backward_s_per_sample),
                )
            )
        operators = format_table(
            (
                "class",
                "count",
                "operators",
                "parameters",
                "forward(1)",
                "backward(1)",
                "forward/sample",
                "backward/sample",
            ),
            rows,
        )
        links = format_table(
            ("group", "collective", "latency", "bandwidth", "residual"),
            [
                (
                    link.group,
                    link.collective,
                    format_seconds(link.latency_s),
                    f"{format_bytes(link.bytes_per_s)}/s",
                    f"{link.residual_fraction * 100:.0f} %",
                )
                for link in self.links
            ],
        )
        return "\n\n".join(filter(None, (operators, links, node_table(self.nodes))))

    def slow_nodes(self) -> tuple[str, ...]:
        """Who is slow and who is small, in sentences; see records.nodes."""
        return slow_nodes(self.nodes)
