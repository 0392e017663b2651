"""Addresses of names in the documentation of torch and Lightning.

They are listed here, so that building the documentation needs no network.
"""

from __future__ import annotations

import re

TORCH = "https://docs.pytorch.org/docs/stable/"
LIGHTNING = "https://lightning.ai/docs/pytorch/stable/"

PAGES = {
    "torch.Tensor": "tensors.html#torch.Tensor",
    "torch.channels_last": "tensor_attributes.html#torch.memory_format",
    "torch.profiler": "profiler.html",
    "torch.amp.GradScaler": "amp.html#torch.amp.GradScaler",
    "torch.autocast": "amp.html#torch.autocast",
    "torch.utils.checkpoint.checkpoint": "checkpoint.html#torch.utils.checkpoint.checkpoint",
    "torch.utils.data.DataLoader": "data.html#torch.utils.data.DataLoader",
    "torch.utils.data.DistributedSampler": (
        "data.html#torch.utils.data.distributed.DistributedSampler"
    ),
    "torch.distributed.ReduceOp": "distributed.html#torch.distributed.ReduceOp",
    "torch.distributed.fsdp.fully_shard": "distributed.fsdp.fully_shard.html",
    "torch.nn.attention.flex_attention": "nn.attention.flex_attention.html",
    "lightning.pytorch.LightningModule": "common/lightning_module.html",
    "lightning.pytorch.LightningDataModule": "data/datamodule.html",
    "lightning.pytorch.Trainer": "common/trainer.html",
    "lightning.pytorch.cli.LightningCLI": "cli/lightning_cli.html",
}
"""Addresses of names without their own page."""

PLAIN = {
    "LBFGS": "torch.optim.LBFGS",
    "torch.compile": "torch.compile",
    "FSDP2": "torch.distributed.fsdp.fully_shard",
    "FSDP1": "lightning.pytorch.strategies.FSDPStrategy",
    "LightningCLI": "lightning.pytorch.cli.LightningCLI",
    "LightningModule": "lightning.pytorch.LightningModule",
    "LightningDataModule": "lightning.pytorch.LightningDataModule",
    "DistributedSampler": "torch.utils.data.DistributedSampler",
}
"""Names that pages also mention without backticks."""

NAMES = (
    *("torch.Tensor", "torch.autocast", "torch.compile", "torch.profiler", "torch.topk"),
    *("torch.channels_last", "torch.set_num_threads", "torch.use_deterministic_algorithms"),
    *("torch.set_float32_matmul_precision", "torch.amp.GradScaler", "torch.autograd.grad"),
    *("torch.cuda.Event", "torch.cuda.empty_cache", "torch.distributed.ReduceOp"),
    *("torch.distributed.fsdp.fully_shard", "torch.func.vmap"),
    *("torch.nn.Module", "torch.nn.SyncBatchNorm", "torch.nn.TransformerEncoderLayer"),
    *("torch.nn.attention.flex_attention", "torch.nn.attention.sdpa_kernel"),
    *("torch.nn.functional.scaled_dot_product_attention",),
    *("torch.nn.parallel.DistributedDataParallel", "torch.nn.utils.clip_grad_norm_"),
    *("torch.nn.utils.clip_grad_value_", "torch.optim.AdamW", "torch.optim.LBFGS"),
    *("torch.optim.SGD", "torch.optim.Optimizer", "torch.utils.checkpoint.checkpoint"),
    *("torch.utils.data.DataLoader", "torch.utils.data.DistributedSampler"),
    *("lightning.pytorch.LightningDataModule", "lightning.pytorch.LightningModule"),
    *("lightning.pytorch.Trainer", "lightning.pytorch.callbacks.Callback"),
    *("lightning.pytorch.callbacks.LearningRateMonitor",),
    *("lightning.pytorch.callbacks.ModelCheckpoint", "lightning.pytorch.cli.LightningCLI"),
    *("lightning.pytorch.strategies.DDPStrategy", "lightning.pytorch.strategies.FSDPStrategy"),
    *("lightning.pytorch.strategies.ModelParallelStrategy",),
)
"""Names that are linked."""


def address_of(name: str) -> str | None:
    """Return the address of a full name, if it is in ``NAMES``."""
    package = name.partition(".")[0]
    base = {"torch": TORCH, "lightning": LIGHTNING}.get(package)
    if base is None or name not in NAMES:
        return None
    folder = {"torch": "generated", "lightning": "api"}[package]
    return base + PAGES.get(name, f"{folder}/{name}.html")


LAST = {name.rpartition(".")[2]: name for name in NAMES}
AMBIGUOUS = {
    "Callback",
    "Event",
    "Tensor",
    "Trainer",
    "channels_last",
    "compile",
    "grad",
    "profiler",
}
"""Last parts with other meanings."""

SHORT = {last: name for last, name in LAST.items() if last not in AMBIGUOUS}
SHORT |= {f"nn.{last}": name for last, name in LAST.items() if name.startswith("torch.nn.")}
SHORT["L.Trainer"] = LAST["Trainer"]


def full_name(text: str) -> str | None:
    """Return the full name of a mention such as ``DDPStrategy`` or ``torch.compile(...)``."""
    called = text.partition("(")[0]
    return called if called in NAMES else SHORT.get(called)


def defined_name(path: str) -> str | None:
    """Return the public name of an annotation's full path."""
    public = LAST.get(path.rpartition(".")[2])
    return public if public and public.partition(".")[0] == path.partition(".")[0] else None


KEPT = (
    r"^(?P<fence>`{3,}).*?^(?P=fence)`*\s*$|<!-- begin: .*?<!-- end -->|^\#.*?$"
    r"|\[(?P<linked>(?:[^\[\]]|\[[^\]]*\])*)\]\([^)]*\)"
)
"""Text without new links: code, generated parts, headings, and links."""

MENTION = re.compile(
    rf"{KEPT}|`(?P<code>[^`\n]+)`"
    rf"|(?<![\w./-])(?P<plain>{'|'.join(map(re.escape, PLAIN))})(?![\w(])",
    re.M | re.S,
)


def link_names(text: str) -> str:
    """Return Markdown in which the first mention of each name is a link."""
    seen: set[str] = set()

    def link(found: re.Match[str]) -> str:
        called = found["linked"] or found["code"] or found["plain"]
        if called is None:
            return found[0]
        name = PLAIN.get(called) or full_name(called.strip("`"))
        if name is None or name in seen:
            return found[0]
        seen.add(name)
        return found[0] if found["linked"] else f"[{found[0]}]({address_of(name)})"

    return MENTION.sub(link, text)


def mentioned(docstring: str) -> dict[str, str]:
    """Return names in backticks or roles of a docstring, with their addresses."""
    names = dict.fromkeys(full_name(called) for called in re.findall(r"`~?([\w.]+)", docstring))
    return {name: address for name in names if name and (address := address_of(name))}


def cross_reference(lines: list[str]) -> None:
    """Turn the first mention of each name in a docstring into a role that can be resolved."""
    seen: set[str] = set()

    def role(found: re.Match[str]) -> str:
        name = full_name(found[1])
        if name is None or name in seen:
            return found[0]
        seen.add(name)
        return f":py:obj:`{found[1]} <{name}>`"

    lines[:] = re.sub(r"``([\w.]+(?:\([^`]*\))?)``", role, "\n".join(lines)).split("\n")
