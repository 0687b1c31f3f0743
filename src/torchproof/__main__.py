"""``python -m torchproof``: the same as the console script."""

import sys

from torchproof.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
