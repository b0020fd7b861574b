"""The machinery under the lessons: start ranks, record what they do, time it on another cluster.

A learner uses it and need not read it.
"""
