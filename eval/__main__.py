"""``python -m latent_santa.eval``, which ``accelerate launch -m`` and torchrun need."""

import sys

from latent_santa.eval.cli import main

if __name__ == "__main__":
    sys.exit(main())
