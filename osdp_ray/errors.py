"""Every error of the package. Each text states the fact with both numbers, the cause, and the remedy.

Facts are attributes, passed in order to `super().__init__`, and the text is built in `__str__`, because Ray moves
exceptions by pickle and pickle calls the class with its `args`. The command line prints any OsdpError without a
traceback and exits with 2.
"""

from osdp_ray.units import format_bytes, format_bytes_up


class OsdpError(Exception):
    """Base of all errors that a user can cause and mend."""


class UsageError(OsdpError):
    """An argument or a combination of arguments that cannot work; the text carries the remedy."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message


class RecordError(OsdpError):
    """A file or value that is no record of the kind and version needed."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(where, problem)
        self.where, self.problem = where, problem

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}"


class ClusterError(OsdpError):
    """The cluster does not answer, or lacks what the run needs."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem, remedy)
        self.problem, self.remedy = problem, remedy

    def __str__(self) -> str:
        return f"{self.problem}. {self.remedy}"


class ClusterFileError(OsdpError):
    """A cluster file that describes no hardware; `line` counts from 1, `key` is the path of the key, '' for none."""

    def __init__(self, path: str, line: int, key: str, problem: str, remedy: str) -> None:
        super().__init__(path, line, key, problem, remedy)
        self.path, self.line, self.key, self.problem, self.remedy = path, line, key, problem, remedy

    def __str__(self) -> str:
        where = f"{self.path}, line {self.line}" + (f", {self.key}" if self.key else "")
        return f"{where}: {self.problem}. {self.remedy}."


class DataError(OsdpError):
    """Training data that is missing, unreadable or too short."""

    def __init__(self, path: str, problem: str, remedy: str) -> None:
        super().__init__(path, problem, remedy)
        self.path, self.problem, self.remedy = path, problem, remedy

    def __str__(self) -> str:
        return f"data {self.path}: {self.problem}. {self.remedy}"


class TraceError(OsdpError):
    """A model that cannot be traced without running it."""

    def __init__(self, module: str, problem: str, remedy: str) -> None:
        super().__init__(module, problem, remedy)
        self.module, self.problem, self.remedy = module, problem, remedy

    def __str__(self) -> str:
        return f"tracing module {self.module or 'the model'!r} failed: {self.problem}. {self.remedy}"


class WorkloadError(OsdpError):
    """A method of the user's workload that raised, or gave what cannot be used; `place` is file:line, '' for none."""

    def __init__(self, method: str, problem: str, place: str, remedy: str) -> None:
        super().__init__(method, problem, place, remedy)
        self.method, self.problem, self.place, self.remedy = method, problem, place, remedy

    def __str__(self) -> str:
        where = f" ({self.place})" if self.place else ""
        return f"the workload's {self.method} {self.problem}{where}. {self.remedy}"


class ShardingError(OsdpError):
    """A module of the model that FSDP2 does not shard."""

    def __init__(self, module: str, problem: str) -> None:
        super().__init__(module, problem)
        self.module, self.problem = module, problem

    def __str__(self) -> str:
        return (
            f"module {self.module or 'the model'!r} cannot be sharded: {self.problem}. Parameters must be contiguous, "
            "of at least one dimension, and all on one device (or all on the meta device) before parallelize."
        )


class InfeasibleError(OsdpError):
    """No plan fits the budget. `holder` is the largest operator of what runs at the leanest plan's peak."""

    def __init__(self, budget_bytes: int, leanest_bytes: int, phase: str, holder: str, micro_batch: int = 0) -> None:
        super().__init__(budget_bytes, leanest_bytes, phase, holder, micro_batch)
        self.budget_bytes, self.leanest_bytes, self.phase, self.holder = budget_bytes, leanest_bytes, phase, holder
        self.micro_batch = micro_batch

    def __str__(self) -> str:
        missing_bytes = self.leanest_bytes - self.budget_bytes
        batch = f"lower --micro-batch (it is {self.micro_batch}), " if self.micro_batch > 1 else ""
        return (
            f"no plan fits in {format_bytes(self.budget_bytes)} per device: the leanest one peaks at "
            f"{format_bytes(self.leanest_bytes)} in the {self.phase} phase, {format_bytes(missing_bytes)} too much, "
            f"and {self.holder!r} is the largest operator there. Raise --memory-budget to at least "
            f"{format_bytes_up(self.leanest_bytes)}, {batch}or add workers."
        )


class SolverError(OsdpError):
    """The solver is missing, failed, or ended without a plan."""

    def __init__(self, solver: str, problem: str, remedy: str) -> None:
        super().__init__(solver, problem, remedy)
        self.solver, self.problem, self.remedy = solver, problem, remedy

    def __str__(self) -> str:
        return f"solver {self.solver}: {self.problem}. {self.remedy}"


class PlanMismatchError(OsdpError):
    """A plan that was made for something else than what it is applied to."""

    def __init__(self, what: str, planned: str, found: str) -> None:
        super().__init__(what, planned, found)
        self.what, self.planned, self.found = what, planned, found

    def __str__(self) -> str:
        return (
            f"the plan was made for {self.what} {self.planned}, and here it is {self.found}. "
            "Plan again for this model and cluster (osdp plan), or use the ones that the plan names."
        )


class SaveError(OsdpError):
    """A save that is missing, damaged, foreign, or cannot be written."""

    def __init__(self, path: str, problem: str, remedy: str) -> None:
        super().__init__(path, problem, remedy)
        self.path, self.problem, self.remedy = path, problem, remedy

    def __str__(self) -> str:
        return f"save {self.path}: {self.problem}. {self.remedy}"


class WorkerError(OsdpError):
    """A training worker failed; names the rank and the original error."""

    def __init__(self, rank: int, problem: str, remedy: str) -> None:
        super().__init__(rank, problem, remedy)
        self.rank, self.problem, self.remedy = rank, problem, remedy

    def __str__(self) -> str:
        who = f"worker {self.rank}" if self.rank >= 0 else "the workers"
        return f"{who} failed: {self.problem}. {self.remedy}"


class WorkerMemoryError(WorkerError):
    """A training worker ran out of memory; the same plan would run out again."""

    def __str__(self) -> str:
        who = f"worker {self.rank}" if self.rank >= 0 else "a worker"
        return f"{who} ran out of memory: {self.problem}. {self.remedy}"


class DivergedError(OsdpError):
    """Training whose numbers are no longer finite; `save_path` is the newest save, of a step before, '' for none."""

    def __init__(self, step: int, problem: str, save_path: str) -> None:
        super().__init__(step, problem, save_path)
        self.step, self.problem, self.save_path = step, problem, save_path

    def __str__(self) -> str:
        saved = f"{self.save_path} is whole and --resume goes on from it" if self.save_path else "nothing is saved"
        return (
            f"training diverged: {self.problem} in step {self.step}. Lower the learning rate, or look in the data and "
            f"the loss for what is not finite; {saved}."
        )


class Interrupted(OsdpError):
    """The run was asked to stop and saved its state first."""

    def __init__(self, signal_number: int, step: int, save_path: str) -> None:
        super().__init__(signal_number, step, save_path)
        self.signal_number, self.step, self.save_path = signal_number, step, save_path

    def __str__(self) -> str:
        if not self.save_path:
            return (
                f"stopped by signal {self.signal_number} before anything was saved; start again, by --resume if it was "
                "training already"
            )
        where = f"after step {self.step}; go on with --resume (save {self.save_path})"
        return f"stopped by signal {self.signal_number} {where}"


class SweepInterrupted(Interrupted):
    """A sweep was asked to stop; `path` holds what it had by then, '' where that was nothing."""

    def __init__(self, signal_number: int, num_planned: int, num_measured: int, path: str) -> None:
        super().__init__(signal_number, num_measured, path)
        self.args = (signal_number, num_planned, num_measured, path)
        self.num_planned, self.num_measured, self.path = num_planned, num_measured, path

    def __str__(self) -> str:
        return (
            f"the sweep was stopped by signal {self.signal_number} with {self.num_planned} budgets planned and "
            f"{self.num_measured} measured. "
            + (f"They are in {self.path}; sweep the other budgets anew." if self.path else "Start it again.")
        )
