"""`python -m megazero.runner`, the same as the command `megazero`."""

import sys

from megazero.runner import main

sys.exit(main())
