"""Shape annotations of the room's computations are checked while its tests run (jaxtyping with beartype)."""

import jaxtyping

CHECKED = ("attention", "decode", "elementary", "exchange", "loss", "moe", "transformer")

jaxtyping.install_import_hook([f"noonsight.model.{name}" for name in CHECKED], "beartype.beartype")
