"""What an experiment file imports: `noonsight.recipe.window`, and the bodies of the stages that join two rooms.

Rooms that must not know each other are joined here and nowhere else. `window` builds stages and is light: no JAX before a stage runs.
`pretraining`, `measuring` and `publishing` are separate modules so that the source closure of a stage holds only what it can reach: a
change in `serve` must not make a training run look different. For the same reason this file imports nothing.
"""
