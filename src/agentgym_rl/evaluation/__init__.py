"""Evaluation: suites of tasks, episodes that survive a kill, metrics with intervals, tables, paired comparisons."""
