"""The engine process, built from a configuration, and the clients that reach it."""
