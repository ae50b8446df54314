"""`python -m velox_cache` is the `velox` command."""

import sys

from velox_cache.cli.main import main

sys.exit(main())
