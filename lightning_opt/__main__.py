"""``python -m lightning_opt``, the same as the command ``lightning-opt``."""

import sys

from lightning_opt.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
