"""Sentinels: faults that a falling loss hides, as rules that are data.

A rule looks at the last measurements and answers with a sentence when something is wrong. It speaks once when its
fault begins and again only after the fault has gone. Thresholds stand in the rule's text, because a page shows them:
green (never spoke), amber (spoke), red (still speaking at the end), unmeasured (what it looks at was never there:
a dense model has no experts, and silence about them is no good news).
"""

from noonsight.train.health.rules import RULES, SPIKE_STEPS, WINDOW, Rule, spike
from noonsight.train.health.watcher import Health, measure_batch

__all__ = ["RULES", "SPIKE_STEPS", "WINDOW", "Health", "Rule", "measure_batch", "spike"]
