"""A small model to tune, and a trainer with one job."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.lm.models.decoder import Decoder
from holdfast.training.trainer import Trainer
from tests.tuning import act, native, new_job, trainer_for


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return native("llama", tmp_path_factory.mktemp("base"))[1]


@pytest.fixture
def opened(model: Decoder, tmp_path: Path) -> Trainer:
    """A trainer with the job "job" resident."""
    trainer = trainer_for(model)
    trainer.open(new_job(tmp_path))
    act(trainer, "job", "restore")
    return trainer
