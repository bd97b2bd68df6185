"""One step, many times: optimiser, train step, flat loop, checkpoints, supervisor, sentinels.

Words of this room. A *step* is one optimiser step, numbered from 0; step `t` uses `batch(t)` and its measurements are
logged at `t`. A *state* is numbered by how many steps it has behind it: state `s` is what step `s` starts from, so a
checkpoint, an evaluation, a parameter hash and a heartbeat carry the number of completed steps.
"""
