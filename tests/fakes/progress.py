"""Progress of builds for tests."""

from collections.abc import Callable

from draftstore.storage.report import OnProgress, Progress


def calling(**steps: Callable[[int, int | None], object]) -> Progress:
    """Return a progress whose named steps call functions with the amount done and the total."""

    def step(name: str, _unit: str) -> OnProgress:
        def report(done: int, total: int | None, detail: str = "") -> None:
            if name in steps:
                steps[name](done, total)

        return report

    return step
