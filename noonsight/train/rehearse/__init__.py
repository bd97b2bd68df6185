"""A dress rehearsal: the real train step, compiled for machines one does not have, and what would happen there.

Files, lowest first: `targets` (the machines), `hlo` (what an optimised program holds and sends), `mistakes` (what in it
contradicts the closed forms), `compile` (the process that lowers and compiles; the only file that imports JAX),
`roofline` (time and money), `report` (one answer, for people and for scripts), `what_if` (many, as a table). Nothing
is executed and no array is made; see `targets` for what that can and cannot tell.
"""
