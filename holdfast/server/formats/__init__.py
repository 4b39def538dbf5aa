"""Formats in which models write tool calls and reasoning: parsers for streamed text, and grammars that enforce them."""
