"""The routes by what they serve. They and `server.app` alone know FastAPI."""
