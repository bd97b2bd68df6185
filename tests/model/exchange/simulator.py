"""Who is dropped, by plain loops over single assignments: written from the published rules, not from the code.

A simulation takes chosen[S, T, A] and valid[S, T] of all S devices of a group, with e experts on each, and returns what
was kept [S, T, A], and the refusals of each device [S] as a sender and as a receiver. Capacity factors are Fractions.
"""

from __future__ import annotations

import math
from collections import defaultdict
from fractions import Fraction

import numpy as np

TRANSPORT, WAVES = Fraction(115, 100), 3


class Outcome:
    """Kept assignments and refusals by cause."""

    def __init__(self, chosen):
        self.kept = np.zeros(chosen.shape, bool)
        self.sender = np.zeros(len(chosen), int)
        self.receiver = np.zeros(len(chosen), int)


def assignments(chosen, valid):
    """(sender, token, choice, expert) of every valid one, in the order of a sender's memory."""
    for s, t, a in np.ndindex(chosen.shape):
        if valid[s, t]:
            yield s, t, a, int(chosen[s, t, a])


def fixed(chosen, valid, e, factor):
    """A cell of ceil(factor * mean) for each sender and expert."""
    found, (shards, tokens, per_token) = Outcome(chosen), chosen.shape
    room, used = math.ceil(factor * tokens * per_token / (shards * e)), defaultdict(int)
    for s, t, a, expert in assignments(chosen, valid):
        if used[s, expert] < room:
            used[s, expert] += 1
            found.kept[s, t, a] = True
        else:
            found.sender[s] += 1
    return found


def pooled(chosen, valid, e, factor):
    """Striped waves between pairs of devices; at the receiver turn by turn."""
    found, (shards, tokens, per_token) = Outcome(chosen), chosen.shape
    full = tokens * per_token
    all_valid = int(valid.sum()) * per_token
    rows = min(
        math.ceil(factor * full / (e * WAVES)), math.ceil(factor * all_valid / (shards * e * WAVES))
    )  # of one expert in one wave
    sent_to, slots = defaultdict(int), defaultdict(list)
    for s, t, a, expert in assignments(chosen, valid):
        rank = sent_to[s, expert // e]
        sent_to[s, expert // e] += 1
        wave, slot = rank % WAVES, rank // WAVES
        mine = int(valid[s].sum()) * per_token
        pool = min(math.ceil(TRANSPORT * full / (shards * WAVES)), math.ceil(TRANSPORT * mine / (shards * WAVES)))
        if slot < pool:
            slots[wave, expert].append((slot, s, t, a))
        else:
            found.sender[s] += 1
    for (_, expert), waiting in slots.items():
        for number, (_, s, t, a) in enumerate(sorted(waiting)):
            found.kept[s, t, a] = number < rows
            found.receiver[expert // e] += number >= rows
    return found


def in_order(chosen, valid, e, room, chunk):
    """One receiver's buffer of `room` rows for each `chunk` of its experts, filled by (expert, sender, token)."""
    found = Outcome(chosen)
    for group in range(0, len(chosen) * e, chunk):
        waiting = sorted(
            (expert, s, t, a) for s, t, a, expert in assignments(chosen, valid) if group <= expert < group + chunk
        )
        for number, (_, s, t, a) in enumerate(waiting):
            found.kept[s, t, a] = number < room
            found.receiver[group // e] += number >= room
    return found


def ring(chosen, valid, e, factor):
    """ceil(factor * mean load of a device)."""
    return in_order(chosen, valid, e, math.ceil(factor * chosen.size / len(chosen)), e)


def ragged(chosen, valid, e, factor):
    """Two chunks of half the rows each, where the experts are even."""
    chunks = 2 if e % 2 == 0 else 1
    capacity = math.ceil(factor * chosen[0].size)
    return in_order(chosen, valid, e, math.ceil(Fraction(capacity, chunks)), e // chunks)


def waterfill(chosen, valid, e, factor):
    """Each expert its nominal rows; what is left over goes to the experts that need it, first to the lowest number."""
    found, nominal = Outcome(chosen), math.ceil(factor * chosen.size / (len(chosen) * e))
    wanted = defaultdict(list)
    for s, t, a, expert in assignments(chosen, valid):
        wanted[expert].append((s, t, a))
    for device in range(len(chosen)):
        experts = range(device * e, device * e + e)
        left = sum(max(nominal - len(wanted[expert]), 0) for expert in experts)
        for expert in experts:
            more = min(left, max(len(wanted[expert]) - nominal, 0))
            left -= more
            for number, where in enumerate(sorted(wanted[expert])):
                found.kept[where] = number < nominal + more
                found.receiver[device] += number >= nominal + more
    return found


RULES = {"ring": ring, "fixed": fixed, "pooled": pooled, "ragged": ragged, "waterfill": waterfill}
