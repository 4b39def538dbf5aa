"""Errors of checkpoints that cannot be served. Importing them loads no PyTorch."""


class UnsupportedCheckpoint(ValueError):
    """A checkpoint that cannot be served. The message says why, and what to do about it if anything helps."""


class NotNative(UnsupportedCheckpoint):
    """A variant of an architecture that the native decoder does not compute. Transformers' code may compute it."""


class DamagedCheckpoint(UnsupportedCheckpoint):
    """A checkpoint with a damaged file: one that is missing, cut off, or holds numbers that are not finite."""


class MisfitCheckpoint(UnsupportedCheckpoint):
    """A checkpoint whose tensors have other names or shapes than its config.json implies."""
