"""`python -m schedir` is the command `schedir`."""

import sys

from schedir.cli import main

if __name__ == "__main__":
    sys.exit(main())
