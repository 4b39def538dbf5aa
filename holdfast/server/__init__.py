"""The HTTP server: OpenAI's routes in front of the engine process. Never imports torch, not even indirectly."""
