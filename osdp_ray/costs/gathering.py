"""FSDP2 while a step is played: which buffers it holds when, as torch 2.13 runs it without streams.

    before forward   gather: a flat buffer, then the whole parameters; the flat buffer of one unit is freed when the
                     next unit copies out, the last one at the end of the model's forward
    after forward    whole parameters freed, unless the unit keeps them, or copied into a shard of the node's size
    before backward  gather again where they were freed (such a shard is freed after it), flat buffer freed at once,
                     then the flat buffers of the `prefetch` units that ran before it are gathered ahead
    after backward   whole parameters freed; the previous unit's reduction input freed, this one's allocated,
                     gradients copied into it and freed, the reduced shard allocated

(`torch.distributed.fsdp._fully_shard`; replicated units copy less, see `modeling.replicas`.) gloo's gathers work on a
copy of the whole; its reductions, in a ring of our own, on their input and output alone.
"""

from osdp_ray.costs.levels import PHASES, PlayedUnit
from osdp_ray.records.profile import FOREIGN, Profile


class Fsdp2:
    """The bytes that are live, the highest so far in this phase, and the units' buffers."""

    def __init__(self, profile: Profile, prefetch: int | None) -> None:
        self.profile = profile
        self.prefetch = profile.default_prefetch if prefetch is None else prefetch
        self.copies = profile.backend == "gloo"
        self.units: list[list[PlayedUnit]] = []
        self.live = self.peak = self.section_peak = 0
        self.phase = "forward"
        self.peaks: dict[str, int] = dict.fromkeys(PHASES, 0)
        self.held_flat = self.reduce_input = self.pending_bytes = self.reduced_bytes = 0
        self.in_backward = False
        self.synchronises = True
        self.recompute_root: PlayedUnit | None = None
        self.begun: list[PlayedUnit] = []  # units that are recomputed in part
        self.forward_order: list[PlayedUnit] = []

    def _alloc(self, num_bytes: int) -> None:
        self.live += num_bytes
        if self.live > self.peak:
            self.peak = self.live

    def _touch(self, num_bytes: int) -> None:
        """Bytes that FSDP2 or a collective holds for a moment: copies, casts."""
        if self.live + num_bytes > self.peak:
            self.peak = self.live + num_bytes

    def _alloc_quietly(self, num_bytes: int) -> None:
        """Bytes whose highest moment `_touch` has seen."""
        self.live += num_bytes

    def _free(self, num_bytes: int) -> None:
        self.live -= num_bytes

    def level_bytes(self) -> int:
        """What is live apart from buffers of collectives that a neighbour frees."""
        return self.live - self.held_flat - self.reduce_input - self.pending_bytes

    def _enter_phase(self, phase: str) -> None:
        self.section_peak = max(self.section_peak, self.peak)
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), self.peak)
        self.phase, self.peak = phase, self.live

    def _before_forward(self, unit: PlayedUnit, subject: int) -> None:
        if unit.phase == "before" and not unit.is_cut_short:
            self._begin_again(unit)
            return  # recomputed while its backward runs: already gathered
        if unit.exits == unit.num_modules:  # the forward of recomputation, or a module that runs again
            unit.exits = 0
            unit.exits_of.clear()
        if unit.exits == 0 and not self.in_backward:
            unit.first = subject
        if self.in_backward and self.recompute_root is None:
            self.recompute_root = unit
        if unit.gathered:
            return
        sizes = unit.sizes
        self._gather(unit)
        self._free(self.held_flat)  # a local of `wait_for_unshard` holds it until the copy out is done
        self.held_flat = sizes.flat_bytes
        unit.gathered = True

    def _begin_again(self, unit: PlayedUnit) -> None:
        """A module of a unit whose backward runs is recomputed; the unit has begun until all of them have run."""
        if unit.num_modules > 1 and unit.num_begun == 0:
            unit.num_begun = unit.num_modules
            self.begun.append(unit)

    def _cut_short(self) -> None:
        """The end of what FSDP2 takes for a whole forward: of units that have begun it thinks that they are through."""
        for unit in self.begun:
            unit.is_cut_short = unit.num_begun > 0
            unit.exits = 0
            unit.exits_of.clear()
        self.begun.clear()

    def _gather(self, unit: PlayedUnit) -> None:
        self._gather_flat(unit)
        self._copy_out(unit)
        if unit.has_node_shard:
            self._free(unit.sizes.node_shard_bytes)
            unit.has_node_shard = False

    def _gather_flat(self, unit: PlayedUnit) -> None:
        """The flat buffer of a gather, unless it was gathered ahead."""
        if unit.pending:
            self.pending_bytes -= unit.sizes.flat_bytes
            unit.pending = False
        else:
            self._alloc_flat(unit)

    def _alloc_flat(self, unit: PlayedUnit) -> None:
        self._alloc(unit.sizes.flat_bytes)
        cast_bytes = 0 if unit.has_node_shard else unit.sizes.cast_bytes  # such a shard is in the compute type
        self._touch(cast_bytes + (unit.sizes.flat_bytes if self.copies else 0))

    def _copy_out(self, unit: PlayedUnit) -> None:
        self._touch(unit.sizes.copy_peak_bytes)
        self._alloc(unit.sizes.gathered_bytes)

    def _after_forward(self, unit: PlayedUnit, subject: int) -> None:
        if unit.phase == "before" and not unit.is_cut_short:
            unit.num_begun = max(0, unit.num_begun - 1)
            return
        operator = local_subject(subject)
        exits = unit.exits_of.get(operator, 0)
        if exits == unit.modules_of[operator]:
            return  # it runs again while others of the unit have yet to run
        unit.exits_of[operator] = exits + 1
        unit.exits += 1
        if unit.exits < unit.num_modules:
            return
        if self.in_backward:
            if unit is self.recompute_root:  # FSDP2 takes it for a forward's root, which drops the last flat buffer
                self._free(self.held_flat)
                self.held_flat = 0
                self.recompute_root = None
                self._cut_short()
            return
        if unit.regather:
            if unit.sizes.node_shard_bytes:
                self._touch(unit.sizes.node_shard_peak_bytes)
                self._alloc_quietly(unit.sizes.node_shard_bytes)
                unit.has_node_shard = True
            self._free(unit.sizes.gathered_bytes)
            unit.gathered = False
        unit.last = subject
        unit.order.append(len(self.forward_order))
        self.forward_order.append(unit)

    def _before_backward(self, unit: PlayedUnit, subject: int) -> None:
        if unit.phase == "before" or subject != unit.last:
            return
        unit.phase = "before"
        if not unit.gathered:
            self._gather(unit)
            self._free(unit.sizes.flat_bytes)
            unit.gathered = True
        if unit.order:
            index = unit.order.pop()
            for ahead in reversed(self.forward_order[max(0, index - self.prefetch) : index]):
                if not ahead.gathered and not ahead.pending:
                    self._alloc_flat(ahead)
                    self.pending_bytes += ahead.sizes.flat_bytes
                    ahead.pending = True

    def _after_backward(self, unit: PlayedUnit, subject: int) -> None:
        if subject != unit.first:
            return
        sizes = unit.sizes
        unit.phase = "after"
        if unit.full_gradient_bytes:
            if self.profile.device_kind == "cpu" and unit.gradient_bytes:
                self._touch(sizes.accumulate_peak_bytes)
            self._free(unit.gradient_bytes)  # added to what waits
            unit.gradient_bytes = 0
        if unit.gathered:
            self._free(sizes.gathered_bytes)
            unit.gathered = False
        if not self.synchronises:
            self._keep_whole_gradients(unit)
            return
        unit.gradient_bytes += unit.full_gradient_bytes
        waited = unit.full_gradient_bytes > 0
        last_bytes = sizes.last_full_gradient_bytes if waited else sizes.last_gradient_bytes
        unit.full_gradient_bytes = 0
        self._free(self.reduce_input)
        self.reduce_input = 0
        if not unit.gradient_bytes:
            return
        if sizes.group_size == 1:
            self._reduce_in_place(unit, waited)
            return
        self._alloc(sizes.reduce_bytes)
        self.reduce_input = sizes.reduce_bytes
        if self.profile.device_kind == "cpu":
            self._touch(sizes.scatter_copy_full_bytes if waited else sizes.scatter_copy_bytes)
        held_bytes = min(last_bytes, unit.gradient_bytes)  # a loop variable of `foreach_reduce` holds it
        self._free(unit.gradient_bytes - held_bytes)
        unit.gradient_bytes = 0
        self._alloc(sizes.gradient_bytes)
        self._free(held_bytes)
        if unit.has_shard_gradient:  # added to the shard that is there
            if unit.all_reduces:
                self.reduced_bytes += sizes.gradient_bytes  # FSDP2 holds on to what it all-reduced
            else:
                self._free(sizes.gradient_bytes)
        unit.has_shard_gradient = True

    def _reduce_in_place(self, unit: PlayedUnit, waited: bool) -> None:
        """Of a replicated unit: see modeling.replicas."""
        sizes = unit.sizes
        if unit.has_shard_gradient:
            self._touch(sizes.replica_peak_added_bytes)
        else:
            self._touch(sizes.replica_peak_waited_bytes if waited else sizes.replica_peak_bytes)
            self._alloc_quietly(sizes.gradient_bytes)
        self._free(unit.gradient_bytes)
        unit.gradient_bytes = 0
        unit.has_shard_gradient = True

    def _keep_whole_gradients(self, unit: PlayedUnit) -> None:
        """Gradients that are not reduced yet wait in the type of the reduction, cast one by one."""
        if not unit.full_gradient_bytes:
            sizes, gradient_bytes = unit.sizes, unit.gradient_bytes
            unit.full_gradient_bytes = round(gradient_bytes * sizes.full_per_gradient)
            if unit.full_gradient_bytes != gradient_bytes:
                self._alloc(unit.full_gradient_bytes)
                self._free(gradient_bytes)
        unit.gradient_bytes = 0

    def _end_backward(self) -> None:
        for units in [self.units[0], *self.units[1:]]:
            for unit in units:
                if unit.phase != "after":
                    self._after_backward(unit, unit.first)
        self._free(self.reduce_input + self.reduced_bytes)
        self.reduce_input = self.reduced_bytes = 0
        self.recompute_root = None
        for units in self.units:
            for unit in units:
                if unit.has_node_shard:
                    self._free(unit.sizes.node_shard_bytes)
                    unit.has_node_shard = False
                if unit.pending:
                    self._free(unit.sizes.flat_bytes)
                    self.pending_bytes -= unit.sizes.flat_bytes
                    unit.pending = False
                unit.order.clear()
                unit.reset()
        self.forward_order.clear()
        self.begun.clear()


def local_subject(subject: int) -> int:
    return subject % FOREIGN if subject >= FOREIGN else subject
