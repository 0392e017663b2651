"""Imported last by the fork server: its children collect garbage without visiting imports."""

import gc

import lightning_opt

for name in lightning_opt.__all__:
    getattr(lightning_opt, name)  # imports its module
gc.collect()
gc.freeze()
