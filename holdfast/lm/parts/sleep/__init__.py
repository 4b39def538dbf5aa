"""Sleep: the engine returns the device's memory for a while, and finds its conversations again afterwards."""
