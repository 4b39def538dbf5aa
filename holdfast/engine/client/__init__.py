"""The client's side of an engine, in the API process. Never imports torch."""
