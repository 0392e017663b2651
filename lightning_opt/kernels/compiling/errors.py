"""What went wrong in torch.compile: which errors are its own, and how to say it in one sentence."""

from __future__ import annotations

COMPILERS = ("torch._dynamo.", "torch._inductor.", "torch._functorch.", "triton.")
"""Where the exception classes of compilers live."""

CODE = ("/torch/_dynamo/", "/torch/_inductor/", "/torch/_functorch/", "/triton/")
"""Where compilers and what runs compiled code live."""

LONGEST = 300
"""Characters of a reason."""


def is_compilers(error: BaseException) -> bool:
    """Return whether ``error`` is of a class that only a compiler raises."""
    return any(f"{kind.__module__}.".startswith(COMPILERS) for kind in type(error).__mro__)


def fails_in_every_mode(error: BaseException) -> bool:
    """Return whether the model could not even be traced: the modes differ in what comes after."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return "TorchDynamoException" in names and "BackendCompilerFailed" not in names


def reason(error: BaseException) -> str:
    """Return the class and the first lines of what lies at the bottom of ``error``."""
    inner = getattr(error, "inner_exception", None)
    shown = inner if isinstance(inner, BaseException) else error
    words: list[str] = []
    for line in str(shown).splitlines():
        if line.startswith(("Set TORCH", "from user code", "You can suppress", "For even more")):
            break
        words.extend(line.split())
    text = " ".join(words)
    text = text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."
    name = type(shown).__name__
    return text if text.startswith(name) else f"{name}: {text}".rstrip(": ")


def passed_compiled_backward(error: BaseException) -> bool:
    """Return whether ``error`` came out of compiled code, or the compiler, in a backward pass."""
    trace, in_backward = error.__traceback__, False
    while trace is not None:
        place = trace.tb_frame.f_code.co_filename.replace("\\", "/")
        in_backward = in_backward or place.endswith("/torch/autograd/graph.py")
        if in_backward and any(part in place for part in CODE):
            return True
        trace = trace.tb_next
    return False
