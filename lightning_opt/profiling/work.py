"""Steps with what they trained on, and what that comes to a second."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_opt.profiling.durations import Durations


@dataclass
class Work:
    """Some steps.

    Attributes:
        steps: Their seconds.
        samples: That they trained on.
        tokens: Likewise; 0 where they are not counted.
    """

    steps: Durations = field(default_factory=Durations)
    samples: int = 0
    tokens: int = 0

    def add(self, seconds: float, samples: int, tokens: int) -> None:
        """Add a step."""
        self.steps.add(seconds)
        self.samples += samples
        self.tokens += tokens

    def rates(self, flops: float | None = None, peak: float | None = None) -> dict[str, float]:
        """Return what is done a second; what is not known is left out.

        Args:
            flops: Operations in all of these steps.
            peak: Operations a second that the device can do, for ``mfu``.
        """
        seconds = self.steps.total
        amounts = {"samples": self.samples, "tokens": self.tokens, "flops": flops}
        found = {f"{name}_per_second": n / seconds for name, n in amounts.items() if n and seconds}
        if peak and "flops_per_second" in found:
            found["mfu"] = found["flops_per_second"] / peak
        return found
