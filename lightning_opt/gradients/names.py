"""The names of modules and parameters as the user's model has them."""

from __future__ import annotations

WRAPPERS = ("_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module.")


def plain_name(name: str) -> str:
    """Return the name that a module or parameter has without FSDP1, torch.compile and the like.

    What is kept by name is then found again by a run that wraps the model otherwise.
    """
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "").removesuffix(wrapper[:-1]).rstrip(".")
    return name
