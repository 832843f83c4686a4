"""Scales a run from one process to many: learner ranks, and engines and environments on other machines."""
