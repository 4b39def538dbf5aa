"""The engine's two sides: the process that runs the loop, and the client that speaks with it."""
