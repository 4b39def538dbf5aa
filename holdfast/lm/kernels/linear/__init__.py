"""The linear layers of a decoder, with the norms, rotations and activations around them."""
