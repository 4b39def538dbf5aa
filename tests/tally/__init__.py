"""A part of the tests' own: the device counts the positions that steps compute, and a message asks for the count."""
