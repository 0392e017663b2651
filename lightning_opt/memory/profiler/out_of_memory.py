"""Reports the live tensors when memory runs out."""

from __future__ import annotations

import gc
import logging
import pickle
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_opt.core.measure.memory import MB, MemoryLimits, live_bytes, resident_memory
from lightning_opt.core.modules.batches import tensors_of
from lightning_opt.core.modules.trial import storages_of
from lightning_opt.core.output.report import Report

log = logging.getLogger(__name__)

MAX_TENSORS = 20

Names: TypeAlias = dict[torch.UntypedStorage, str]


def _largest_tensors(
    error: BaseException, names: Names, device: torch.device, phase: str
) -> Report:
    """Return the largest live tensors, with their names and the operations that made them.

    Tensors saved by autograd are not listed, because they are not Python objects.
    """
    tensors: dict[torch.UntypedStorage, Tensor] = {}
    for thing in gc.get_objects():
        # Not `isinstance`, which runs the code of proxies.
        if type(thing) in (Tensor, nn.Parameter) and thing.device.type == device.type:
            tensors.update((storage, thing) for storage in storages_of(thing))
    rows = [
        {
            "MB": storage.nbytes() / MB,
            "what": names.get(storage, "?"),
            "shape": str(tuple(tensors[storage].shape)),
            "dtype": str(tensors[storage].dtype).removeprefix("torch."),
            "made by": getattr(tensors[storage].grad_fn, "name", lambda: None)(),
        }
        for storage in sorted(tensors, key=lambda storage: -storage.nbytes())[:MAX_TENSORS]
    ]
    live, listed = live_bytes(device), sum(storage.nbytes() for storage in tensors)
    limits = [
        f"{u.source}: {u.used / MB:,.0f} of {u.total / MB:,.0f} MB."
        for u in MemoryLimits(device).read()
    ]
    notes = [
        f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",
        f"{live / MB:,.0f} MB live, {listed / MB:,.0f} MB of it in {len(tensors):,} tensors that "
        "Python references; the rest is saved by autograd or other memory.",
        f"Resident {resident_memory() / MB:,.0f} MB. {' '.join(limits)}",
    ]
    return Report(f"Out of memory in {phase}: the largest live tensors", rows, notes)


def write_out_of_memory_report(
    error: BaseException,
    module: nn.Module | None,
    optimizers: Iterable[Any],
    device: torch.device,
    phase: str,
    folder: Path,
) -> None:
    """Write the report as text and JSON, on CUDA also a snapshot for torch's memory_viz.

    If that fails, for example because memory is short, it only logs a warning.
    """
    file = folder / "out_of_memory.txt"
    try:
        names = _names(error, module, optimizers)
        report = _largest_tensors(error, names, device, phase)
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{report}\n")
        file.with_suffix(".json").write_text(report.to_json())
        if device.type == "cuda":
            with file.with_suffix(".pickle").open("wb") as snapshot:
                pickle.dump(torch.cuda.memory._snapshot(device), snapshot)
    except (MemoryError, RuntimeError, OSError) as other:
        log.warning("MemoryProfiler could not write the live tensors: %s", other)
    else:
        log.warning("Out of memory in %s; the largest live tensors are in %s.", phase, file)


def _names(error: BaseException, module: nn.Module | None, optimizers: Iterable[Any]) -> Names:
    """Return names of tensors by their storage.

    A tensor is named as a local variable in the traceback, an attribute of a module, an optimizer
    state, a gradient, a parameter or a buffer. Of several names the last in this order is used.
    """
    named = [
        (f"{frame.f_code.co_name}: {name}", value)
        for frame, _ in traceback.walk_tb(error.__traceback__)
        for name, value in frame.f_locals.items()
    ]
    if module is not None:
        parameters = {parameter: name for name, parameter in module.named_parameters()}
        for name, part in module.named_modules():
            named += [(f"{name}.{key}".lstrip("."), value) for key, value in vars(part).items()]
        for optimizer in optimizers:
            for parameter, state in getattr(optimizer, "state", {}).items():
                owner = f"{type(optimizer).__name__}.state[{parameters.get(parameter, '?')}]"
                values = state.items() if isinstance(state, dict) else ()
                named += [(f"{owner}.{key}", value) for key, value in values]
        named += [(f"{name}.grad", parameter.grad) for parameter, name in parameters.items()]
        named += [*module.named_parameters(), *module.named_buffers()]
    return {
        storage: name
        for name, value in named
        if issubclass(type(value), (Tensor, list, tuple, dict))  # not `isinstance`, as above
        for tensor in tensors_of(value)
        for storage in storages_of(tensor)
    }
