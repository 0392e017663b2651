"""A driver's library that knows some devices, in the place of ``pynvml``."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


@dataclass(eq=False)
class Card:
    """A GPU, or a slice of one."""

    uuid: str
    use: int | None = None
    used: int = 0
    milliwatts: int | None = None
    celsius: int | None = None
    board: "Card | None" = None
    slices: "list[Card]" = field(default_factory=list)


class Driver:
    """Answers what NVML answers, with its errors, for the cards it is given.

    Like NVML it orders cards by their place on the bus, takes no abbreviated UUIDs, and tells
    neither use nor power nor temperature of a slice.
    """

    NVML_TEMPERATURE_GPU = 0
    NVML_DEVICE_MIG_ENABLE = 1
    nvmlMemory_v2 = 2  # noqa: N815 - as in pynvml

    class NVMLError(Exception):
        pass

    def __init__(self, *cards: Card) -> None:
        self.cards = list(cards)
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} is no function of NVML that this fake has")

    def _known(self, value: Any) -> Any:
        if value is None:
            raise self.NVMLError("Not Supported")
        return value

    def nvmlInit(self) -> None:  # noqa: N802
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Card:  # noqa: N802
        everything = [*self.cards, *(s for card in self.cards for s in card.slices)]
        return self._known(next((card for card in everything if card.uuid == uuid), None))

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Card:  # noqa: N802
        return self.cards[index]

    def nvmlDeviceGetUUID(self, card: Card) -> str:  # noqa: N802
        return card.uuid

    def nvmlDeviceIsMigDeviceHandle(self, card: Card) -> int:  # noqa: N802
        return int(card.board is not None)

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, card: Card) -> Card:  # noqa: N802
        return self._known(card.board)

    def nvmlDeviceGetMigMode(self, card: Card) -> list[int]:  # noqa: N802
        return [int(bool(card.slices)), 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, card: Card) -> int:  # noqa: N802
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card: Card, index: int) -> Card:  # noqa: N802
        # As on a GPU whose first place is empty.
        return self._known(card.slices[index - 1] if 0 < index <= len(card.slices) else None)

    def nvmlDeviceGetUtilizationRates(self, card: Card) -> Any:  # noqa: N802
        self.asked.append(card.uuid)
        return SimpleNamespace(gpu=self._known(card.use))

    def nvmlDeviceGetMemoryInfo(self, card: Card, version: int = 1) -> Any:  # noqa: N802
        return SimpleNamespace(used=card.used, free=1, total=card.used + 1, reserved=0)

    def nvmlDeviceGetPowerUsage(self, card: Card) -> int:  # noqa: N802
        return self._known(card.milliwatts)

    def nvmlDeviceGetTemperature(self, card: Card, sensor: int) -> int:  # noqa: N802
        return self._known(card.celsius)


def mig_card(number: int, slices: int = 2) -> Card:
    """Return a GPU in MIG mode."""
    board = Card(f"GPU-{number}", use=None, milliwatts=300_000, celsius=70)
    board.slices = [Card(f"MIG-{number}-{i}", used=100 + i, board=board) for i in range(slices)]
    return board
