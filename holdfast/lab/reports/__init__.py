"""Tables, pages and plots of what `holdfast bench` and `holdfast plan` find. `plots` needs matplotlib, an extra."""
