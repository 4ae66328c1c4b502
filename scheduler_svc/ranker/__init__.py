"""The length ranker: a small model that learns, from this run's own answers, how long the answer to a prompt will be.

It lives in a process of its own at the lowest priority (worker.py), so that neither torch nor training is ever in the
way of the scheduler's loop (process.py is its side of it). The model (network.py) says how fast answers end at which
length (duration.py); training goes on as answers come (learner.py, examples.py) and is kept in the run's folder
(kept.py). How its forecasts are combined with what is known of a prompt is in scheduler_svc/lengths.py.
"""
