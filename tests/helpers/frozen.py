"""Imported last by the fork server: its children import nothing and read no packages' metadata."""

import functools
import gc

from lightning.fabric.utilities import registry

import lightning_opt

for name in lightning_opt.__all__:
    getattr(lightning_opt, name)  # imports its module
# Otherwise each Trainer reads the metadata of every installed package.
registry.entry_points = functools.cache(registry.entry_points)
gc.collect()
gc.freeze()  # no collection visits what was imported
