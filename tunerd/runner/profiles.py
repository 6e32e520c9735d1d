"""How finalists, sentinels and loads are measured, and where a kernel finds its weights.

Each call takes the next of several copies of its weights, and comes back to one after all others.
How far the copies reach decides what the last-level cache holds: the L2 of a GPU, on a CPU the last
that cores share.

    model   over as many bytes as an inference of the model touches, or over twice the cache if that
            is less: between two calls of a kernel the others push out so much and no more. These
            bytes are all weights, and the most activations that are needed at once; rounded up to a
            power of two, so that times of models of about the same size are comparable.
    cold    over twice the cache: a call finds nothing there.
    warm    there is one copy: the weights are where the call before has left them.

There are 512 copies and 1 GiB at most, so that weights of less than some hundred KiB find some of
themselves. Activations are warm in any case: the kernel before has just written them. Nothing is
known of what other processes push out.

The search has the model's range, and so have finalists unless something else is asked for. On an
H200, whose L2 is 60 MiB, kernels of an encoder take up to 47% longer where their copies reach over
more than some 30 MiB, and how much depends on the kernel (results, "What a kernel does not meet
alone"). On one core beside a cache of 32 MiB they take 18% longer in sum, as in the model (results,
"Functions on CPUs").
"""

from __future__ import annotations

from dataclasses import replace

from tunerd.vocabulary import Profile

L2 = ("model", "cold", "warm")
# Each extra candidate of the finals costs its build and so many samples, at least.
FINAL_SAMPLES, FINAL_SECS = 40, 2.0
# Of 2 ms half of an H200's samples are within 0.1% of their median.
FINAL_SAMPLE_SECS = {"model": 0.002, "cold": 0.002, "warm": 0.005}

# Of a spot check: five samples of a kernel, of which a drift of some percent can be told.
BASELINE_CHECK = Profile("sentinel-v2", max_samples=5, max_total_secs=0.02)
# Of a load: a burst of calls that is short beside whatever it disturbs.
LOAD = Profile("load-v1", min_sample_secs=0.001)


# Of a model, for its profiles: twice any cache of today is no more.
_MOST_MODEL_BYTES = 256 << 20


def within(profile: Profile, model_bytes: int) -> Profile:
    """Return a profile as it is for the kernels of a model that touches so many bytes."""
    if profile.weights != "model" or not model_bytes:
        return profile
    rounded = min(_MOST_MODEL_BYTES, max(1 << 20, 1 << (model_bytes - 1).bit_length()))
    return replace(profile, name=f"{profile.name}-{rounded >> 20}MiB", model_bytes=rounded)


def range_of(profile: Profile, cache_bytes: int) -> int:
    """Return over how many bytes copies of weights reach; 0 where there is one."""
    if profile.weights == "warm":
        return 0
    if profile.weights == "model" and profile.model_bytes:
        return min(2 * cache_bytes, profile.model_bytes)
    return 2 * cache_bytes


def final_profile(l2: str) -> Profile:
    """Return how finalists are measured with a cache as `l2` says: 20 samples at least."""
    if l2 not in L2:
        raise ValueError(f"l2 is {l2!r}; it is one of {', '.join(L2)}")
    return Profile(
        f"final-v6-{l2}",
        weights=l2,
        min_samples=20,
        max_samples=FINAL_SAMPLES,
        min_sample_secs=FINAL_SAMPLE_SECS[l2],
        max_total_secs=FINAL_SECS,
        hopeless_after=20,
    )
