"""A clock that tests set."""


class FakeClock:
    """Stands in for ``time.perf_counter``."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now
