"""The error of a test bed that does not come up or cannot do what was asked."""


class TestBedError(Exception):
    """What failed, and what to do."""

    __test__ = False  # no class of tests, whatever its name begins with

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem, remedy)
        self.problem, self.remedy = problem, remedy

    def __str__(self) -> str:
        return f"{self.problem}. {self.remedy}"
