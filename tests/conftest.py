"""Settings that every test runs under."""

from hypothesis import settings

# A slow machine must not fail a test: none is timed. Runs are derandomized so that a failure repeats.
settings.register_profile("holdfast", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("holdfast")
