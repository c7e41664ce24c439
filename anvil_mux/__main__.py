"""``python -m anvil_mux``."""

import sys

from anvil_mux.cli import main

sys.exit(main())
