"""The migration steps of a server's store, in their order."""

from __future__ import annotations

from holdfast.server.conversations.database import MigrationStep
from holdfast.server.jobs.tables import STEPS as JOB_STEPS
from holdfast.server.keys.tables import STEPS as KEY_STEPS

SCHEMA: tuple[MigrationStep, ...] = (*JOB_STEPS, *KEY_STEPS)
"""Steps that follow those of conversations. A later step is added at the end."""
