"""`python -m fxlab`: the command ``fxlab``, where its script is not on the path."""

import sys

from fxlab.cli import main

if __name__ == "__main__":
    sys.exit(main())
