"""The HTTP routes. Only they and `server.app` import FastAPI."""
