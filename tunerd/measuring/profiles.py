"""How finalists, sentinels and loads are measured, and what a cold and a warm cache mean.

The cache is the last level that all calls share: the L2 of a GPU, the last level of a CPU.

    cold    A call finds none of its weights in the cache: each takes the next of several copies,
            together over twice the cache, as between two inferences the rest of the model pushes
            them out. There are 64 copies or 1 GiB at most, so weights of less than a thirty-second
            of the cache find some of themselves.
    warm    All calls use one copy: the weights are where the call before has left them, as far as
            they fit.

Activations are warm either way: the kernel before has just written them. The search takes what
suits its device: warm on CPUs, whose caches hold most models, and cold on GPUs.
"""

from __future__ import annotations

from tunerd.vocabulary import Profile, TargetSpec

L2 = ("cold", "warm")
# Each extra candidate of the finals costs its build and so many samples, at least.
FINAL_SAMPLES, FINAL_SECS = 40, 2.0
# Of 2 ms half of an H200's samples are within 0.1% of their median (results/h200-shares).
FINAL_SAMPLE_SECS = {"cold": 0.002, "warm": 0.005}

# Of a spot check: five samples of a kernel, of which a drift of some percent can be told.
SENTINEL = Profile("sentinel-v2", max_samples=5, max_total_secs=0.02)
# Of a load: a burst of calls that is short beside whatever it disturbs.
LOAD = Profile("load-v1", min_sample_secs=0.001)


def final_profile(l2: str) -> Profile:
    """Return how finalists are measured with a cold or a warm cache: 20 samples at least."""
    if l2 not in L2:
        raise ValueError(f"l2 is {l2!r}; it is one of {', '.join(L2)}")
    return Profile(
        f"final-v3-{l2}",
        weights=l2,
        min_samples=20,
        max_samples=FINAL_SAMPLES,
        min_sample_secs=FINAL_SAMPLE_SECS[l2],
        max_total_secs=FINAL_SECS,
        hopeless_after=20,
    )


def usual_l2(target: TargetSpec) -> str:
    """Return what the finals of a target measure where nobody says: as its search, or colder."""
    return "cold" if target.is_cuda else "warm"
