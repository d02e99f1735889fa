"""Show the progress of a long job on standard error."""

from tqdm import tqdm


class Progress:
    """A progress bar that is called with what is done and the total; only a terminal shows it."""

    def __init__(self, unit: str):
        self.bar = tqdm(unit=f" {unit}", unit_scale=True, disable=None, leave=False)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def __call__(self, done: int, total: int) -> None:
        """Move the bar."""
        self.bar.total = total
        self.bar.update(done - self.bar.n)
