"""Training from a client's own loop, in the protocol of Tinker's SDK: sessions, models, futures and checkpoints."""
