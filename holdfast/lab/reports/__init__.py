"""Tables, pages and plots for `holdfast bench` and `holdfast plan`.

`plots` needs the extra matplotlib.
"""
