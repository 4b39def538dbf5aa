"""The parts of an engine, as its process builds and serves them: one module for each."""
