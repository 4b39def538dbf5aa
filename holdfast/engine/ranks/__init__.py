"""An engine of several devices: its processes, and what makes them look like one device."""
