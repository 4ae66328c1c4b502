"""Learning curves: which runs they are of, doing them one by one, keeping each, and the page that shows them.

`python -m benchmarks.curves run` does what is missing, each run as a user would, and keeps its figures in
docs/curves/data; `draw` makes docs/curves.md and its plots of what is kept, without a run. How fast a run was is no
affair of theirs.
"""
