"""Report the live tensors when memory runs out."""

from __future__ import annotations

import gc
import logging
import pickle
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_opt.core.measure.memory import MB, MemoryLimits, live_bytes, resident_memory
from lightning_opt.core.modules.trial import storages_of
from lightning_opt.core.output.report import Report
from lightning_opt.memory.object_graph import Root, Walk, describe, is_a, is_dense

log = logging.getLogger(__name__)

MAX_TENSORS = 20


def report_live_tensors(
    error: BaseException,
    module: nn.Module | None,
    optimizers: Iterable[Any],
    device: torch.device,
    phase: str,
) -> Report:
    """Return the largest live tensors, with their names and the operations that made them.

    Names are paths from the module, its optimizers, and local variables of the functions in the
    error's traceback. Tensors saved by autograd are not listed, because they are not Python
    objects.
    """
    tensors: dict[int, Tensor] = {}
    for thing in gc.get_objects():
        if is_a(thing, Tensor) and thing.device.type == device.type and is_dense(thing):
            known = tensors.get(thing.untyped_storage().data_ptr())
            if known is None or is_a(thing, nn.Parameter):
                tensors[thing.untyped_storage().data_ptr()] = thing
    sizes = {address: tensor.untyped_storage().nbytes() for address, tensor in tensors.items()}
    names = _names(module, optimizers)
    walk = Walk(_roots(error, module))
    rows = []
    for address in sorted(sizes, key=lambda address: -sizes[address])[:MAX_TENSORS]:
        tensor = tensors[address]
        path = walk.path(tensor)
        description = describe(path, walk.name(path[0])) if path else "?"
        rows.append(
            {
                "MB": sizes[address] / MB,
                "what": names.get(address, description),
                "shape": str(tuple(tensor.shape)),
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "made by": tensor.grad_fn.name() if tensor.grad_fn is not None else None,
            }
        )
    live, listed = live_bytes(device), sum(sizes.values())
    notes = [
        f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
        f"{live / MB:,.0f} MB live, {listed / MB:,.0f} MB of it in {len(tensors):,} tensors that "
        "Python references; the rest is saved by autograd or other memory.",
        f"Resident {resident_memory() / MB:,.0f} MB. "
        + " ".join(
            f"{usage.source}: {usage.used / MB:,.0f} of {usage.total / MB:,.0f} MB."
            for usage in MemoryLimits(device).read()
        ),
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
        report = report_live_tensors(error, module, optimizers, device, phase)
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


def _names(module: nn.Module | None, optimizers: Iterable[Any]) -> dict[int, str]:
    """Return names of the model's and optimizers' tensors, by the address of their memory."""
    if module is None:
        return {}
    parameter_names = {parameter: name for name, parameter in module.named_parameters()}
    named = [(f"{name}.grad", p.grad) for p, name in parameter_names.items() if p.grad is not None]
    for optimizer in optimizers:
        for parameter, state in getattr(optimizer, "state", {}).items():
            for key, value in state.items() if isinstance(state, dict) else ():
                owner = parameter_names.get(parameter, "?")
                named.append((f"{type(optimizer).__name__}.state[{owner}].{key}", value))
    named += [*module.named_parameters(), *module.named_buffers()]
    return {
        storage.data_ptr(): name
        for name, tensor in named
        if isinstance(tensor, Tensor)
        for storage in storages_of(tensor)
    }


def _roots(error: BaseException, module: nn.Module | None) -> list[Root]:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    named = [] if module is None else [(type(module).__name__, module)]
    innermost = frames[:-13:-1]  # twelve frames, the innermost first
    return [*named, *((f"{frame.f_code.co_name}:", dict(frame.f_locals)) for frame in innermost)]
