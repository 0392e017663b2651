"""Issues: those seen in a single report, and those that persist. Plain data, no measuring.

Most faults have to be seen in several reports in a row to be an issue, and an issue goes after two
reports without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

CRITICAL, WARNING = "critical", "warning"

ADVICE = {
    "nan": "GradientHealth(activations=True) names the module that made the first NaN. Look there "
    "for log, sqrt, division or acos at the edge of their domain; NonFiniteGuard skips such steps.",
    "inf": "Look for exp, division by small numbers, or a too large learning rate; under 16-mixed, "
    "use bf16-mixed. NonFiniteGuard skips such steps.",
    "exploding": "Add AdaptiveClipping(), lower the learning rate or lengthen its warm-up; check "
    "initialisation and normalisation of the layer named, and that the loss is a mean, not a sum.",
    "vanishing": "Replace sigmoid or tanh by ReLU, GELU or SiLU, add residual connections or "
    "normalisation, and initialise for the activation in use (He, Xavier).",
    "dead": "No gradient reaches this layer. Its ReLU may never fire (lower the learning rate, "
    "use LeakyReLU or GELU, re-initialise), or its output is detached or multiplied by zero.",
    "bottleneck": "Look at what lies between the two layers, and at the input of this one: a "
    "saturated activation, a small constant factor, a normalisation with a large denominator. A "
    "residual connection helps.",
    "imbalance": "Give this layer a learning rate of its own, initialise it smaller or scale its "
    "output; clipping by total norm sees nothing but this layer (AdaptiveClipping('unit_wise')).",
    "stale": "Nothing in the loss depends on it: was it left out of forward(), detached, or used "
    "only in some batches? If meant so, set requires_grad=False or leave it out of the optimizer.",
}

REPORTS_NEEDED = {
    "nan": 1, "inf": 1, "exploding": 1, "vanishing": 2, "dead": 3, "bottleneck": 2, "imbalance": 3,
    "stale": 2,
}  # fmt: skip
"""Reports in a row until a finding is an issue."""

REPORTS_TO_CLEAR = 2


@dataclass(frozen=True, slots=True)
class Issue:
    """A fault, where it is and what to do about it.

    Attributes:
        type: ``nan``, ``inf``, ``exploding``, ``vanishing``, ``dead``, ``bottleneck``,
            ``imbalance`` or ``stale``.
        severity: ``"critical"``: training fails or stands still. ``"warning"``: worth a look.
        place: The layer concerned, the worst one if there are several; or ``"all layers"``.
        detail: What was measured there.
        badness: To find the worst of several, the larger the worse.
        since: The step of the report that first saw it, once it persists.
        others: The other layers concerned, in forward order.
    """

    type: str
    severity: str
    place: str
    detail: str
    badness: float = 0.0
    since: int = 0
    others: tuple[str, ...] = ()

    @property
    def advice(self) -> str:
        """What to do."""
        return ADVICE[self.type]

    @property
    def where(self) -> str:
        """The place, and how many more there are."""
        return self.place + (f" and {len(self.others)} more" if self.others else "")

    def __str__(self) -> str:
        return f"[{self.severity}] {self.type} at {self.where}: {self.detail}."


class Persistence:
    """Keeps the issues seen often enough in a row, and not gone for two reports."""

    def __init__(self) -> None:
        self._tracks: dict[str, dict[str, Any]] = {}

    def update(self, findings: Sequence[Issue], step: int) -> None:
        """Take in what the report at ``step`` saw."""
        seen = {self._key(finding): finding for finding in findings}
        for key, finding in seen.items():
            track = self._tracks.setdefault(key, {"seen": 0, "missed": 0, "since": step})
            # Once weights are NaN every layer is: what counts is where it came from.
            if key != "nonfinite" or not track["seen"]:
                track |= asdict(finding) | {"since": track["since"]}
            track["seen"] += 1
            track["missed"] = 0
        for key in [key for key in self._tracks if key not in seen]:
            track = self._tracks[key]
            track["missed"] += 1
            if track["missed"] >= REPORTS_TO_CLEAR or track["seen"] < REPORTS_NEEDED[track["type"]]:
                del self._tracks[key]

    def _key(self, finding: Issue) -> str:
        if finding.type in ("nan", "inf"):
            return "nonfinite"
        # What is an issue at once needs no place to be recognised by, and may move.
        at_once = REPORTS_NEEDED[finding.type] == 1
        return finding.type if at_once else f"{finding.type}|{finding.place}"

    def issues(self, order: Mapping[str, int]) -> list[Issue]:
        """Return what has persisted, one issue a type: critical ones first, then by type.

        Args:
            order: The place of each layer.
        """
        lasting = [t for t in self._tracks.values() if t["seen"] >= REPORTS_NEEDED[t["type"]]]
        issues = []
        for kind in sorted({track["type"] for track in lasting}, key=list(ADVICE).index):
            tracks = [track for track in lasting if track["type"] == kind]
            worst = max(tracks, key=lambda t: (t["severity"] == CRITICAL, t["badness"]))
            others = {track["place"] for track in tracks if track is not worst}
            since = min(track["since"] for track in tracks)
            places = tuple(sorted(others, key=lambda place: order.get(place, len(order))))
            own = {key: worst[key] for key in ("type", "severity", "place", "detail", "badness")}
            issues.append(Issue(**own, since=since, others=places))
        return sorted(issues, key=lambda issue: issue.severity != CRITICAL)

    def state_dict(self) -> dict[str, Any]:
        """Return everything as plain types."""
        return {key: dict(track) for key, track in self._tracks.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._tracks = {key: dict(track) for key, track in state_dict.items()}
