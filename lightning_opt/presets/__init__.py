"""Lists of callbacks and Trainer arguments that fit the machine, by name.

``lightning_opt.presets.MicroBatching`` is ``lightning_opt.MicroBatching`` as a part of a preset: if
it does not support the run, it is left out with a warning. So is each other callback. The
configurations that presets write name these classes.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    import lightning_opt
    from lightning_opt.presets.preset import as_part
    from lightning_opt.trainer.run_callback import RunCallback

    kind = getattr(lightning_opt, name, None)
    if not (isinstance(kind, type) and issubclass(kind, RunCallback)):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return as_part(kind)  # type: ignore[arg-type]  # of the cache
