"""``python -m localspec``, the same as the ``localspec`` command."""

import sys

from localspec.cli import main

if __name__ == "__main__":
    sys.exit(main())
