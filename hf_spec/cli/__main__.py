"""``python -m hf_spec.cli``, for launchers that start modules."""

import sys

from hf_spec.cli import main

sys.exit(main())
