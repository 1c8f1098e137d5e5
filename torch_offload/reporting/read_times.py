"""How long single reads from the SSD took."""

from dataclasses import dataclass

SHOWN = {"p50": 0.5, "p99": 0.99, "max": 1.0}
"""The quantiles that a report names."""

Bin = tuple[float, float, int]
"""Its bounds in seconds, and how many reads took so long."""


@dataclass(frozen=True)
class ReadTimes:
    """A histogram of reads by how long each took, from the moment at which the I/O engine had it.

    Attributes:
        bins: Those that have any reads, the shortest first. The bounds of one are at most an eighth apart, so no
            figure made of them is off by more than that.
    """

    bins: tuple[Bin, ...] = ()

    @property
    def count(self) -> int:
        """How many reads there were."""
        return sum(count for _, _, count in self.bins)

    def quantile(self, share: float) -> float:
        """Return the seconds within which that share of the reads had come, 0 where there were none.

        Args:
            share: From 0 to 1.
        """
        wanted = share * self.count
        for begin, end, count in self.bins:
            if wanted <= count:
                return begin + (end - begin) * wanted / count
            wanted -= count
        return self.bins[-1][1] if self.bins else 0.0

    def quantiles(self) -> dict[str, float]:
        """Return seconds by name: half of the reads, 99 of 100 and all came within so many; empty without reads."""
        return {name: self.quantile(share) for name, share in SHOWN.items()} if self.bins else {}

    def __str__(self) -> str:
        """Return one line."""
        if not self.bins:
            return "none"
        shown = ", ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in self.quantiles().items())
        return f"{self.count}: {shown}"
