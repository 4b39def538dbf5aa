"""`python -m holdfast.cli`: the `holdfast` command when it is not on the path."""

import sys

from holdfast.cli import main

sys.exit(main())
