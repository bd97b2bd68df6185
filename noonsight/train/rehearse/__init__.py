"""A dress rehearsal: the real train step, compiled for machines one does not have, and what would happen there.

Files, lowest first: `targets` (the machines), `job` (a run cut to one), `hlo` (what an optimised program holds and
sends), `compile` (the process that lowers and compiles; the only file that imports JAX), `mistakes` (what in it
contradicts the closed forms), `traffic` (what its exchange should send), `roofline` (time and money), `report` (one
answer, for people and for scripts), `what_if` (many, as a table). Nothing is executed and no array is made: it is
evidence about shapes, memory and what is sent, and of speed only an estimate whose assumptions are printed.
"""
