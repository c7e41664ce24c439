"""``python -m anvil_mux``."""

import sys

from anvil_mux.cli.main import main

sys.exit(main())
