"""The formats in which models write tool calls and reasoning: read from text as it comes, and asked for by grammar."""
