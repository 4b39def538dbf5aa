"""Makes holdfast-tiny: dialogues, training, evaluation."""
