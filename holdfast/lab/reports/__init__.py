"""Tables, pages and plots of what `holdfast bench` and `holdfast plan` found. matplotlib is an extra: see `plots`."""
