"""Imported last by the fork server: its children collect garbage without visiting imports."""

import gc

import lightning_opt
import tests.helpers.trainers  # noqa: F401 - Trainers of the children are created faster

for name in lightning_opt.__all__:
    getattr(lightning_opt, name)  # imports its module
gc.collect()
gc.freeze()
