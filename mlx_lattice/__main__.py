"""``python -m mlx_lattice`` is the command mlx-lattice."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
