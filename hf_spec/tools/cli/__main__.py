"""``python -m hf_spec.tools.cli``, for launchers that start modules."""

import sys

from hf_spec.tools.cli import main

sys.exit(main())
