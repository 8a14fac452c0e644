"""From a sampler's rows to what clients see."""
def logprobs_of(*a): return None
