"""Documents to batches: text becomes token ids, ids become a store, and `batch(step)` is a pure function of it.

Read the files in this order: kept (the chosen documents, one by one) -> tokenizer -> store -> permutation -> mixture ->
order -> batches -> trace.
"""
