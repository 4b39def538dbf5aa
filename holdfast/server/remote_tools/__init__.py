"""Tools of remote MCP servers (Model Context Protocol), which the server calls for the model."""
