"""Matrix kernels in C++ for processors with bfloat16 units (AVX512-BF16, AMX), called through `jax.ffi`.

They are built by g++ when first needed and kept in the user's cache. Where compiler or unit is missing everything runs
through XLA, with the same equations. Arrays come and go in float32; products round their inputs to bfloat16 and add in
float32, which is what `ModelConfig.matmul_dtype == "bfloat16"` says, so the choice changes rounding only.
"""

from noonsight.model.native.build import description, is_available, serves
from noonsight.model.native.calls import attend, cross_entropy, experts, newton_schulz, product

__all__ = ["attend", "cross_entropy", "description", "experts", "is_available", "newton_schulz", "product", "serves"]
