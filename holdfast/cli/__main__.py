"""`python -m holdfast.cli`, for when the `holdfast` command is not on the path."""

import sys

from holdfast.cli import main

sys.exit(main())
