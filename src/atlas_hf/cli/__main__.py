"""`python -m atlas_hf.cli`."""

import sys

from atlas_hf.cli.main import main

sys.exit(main())
