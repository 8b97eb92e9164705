"""What a joint model's diagnostics say, in plain words.

A flag is a reason not to quote the bounds as they stand. No flags means that none of the known
signs of trouble were seen, not that the number is right.
"""

from residual_ebm.estimation.perplexity import JointPerplexity

# Shares of prefixes above which a sign of trouble is worth a sentence.
_MANY = 0.1
_STILL_MOVING = 0.25  # of the gain or loss, between n/4 and n, or between the bounds
_FEW_EFFECTIVE = 0.02  # of n
_TOO_FEW_EFFECTIVE = 10  # whatever n is; of very small n, half

# What a flag's sentence begins with, up to its colon.
KINDS = ("still moving", "wide", "heavy weights", "few effective samples", "out of reach")


def flags(joint: JointPerplexity, base: float) -> list[str]:
    """Sentences for a person; empty when nothing looks wrong."""
    found = []
    first, last = joint.bounds_at[0], joint.bounds_at[-1]
    gain = base - joint.upper
    moved = max(last.upper - first.upper, last.lower - first.lower)
    allowed = max(_STILL_MOVING * abs(gain), 1e-6 * base)
    if moved > allowed:
        found.append(
            f"still moving: a bound rose by {moved:.3g} from n = {first.num_samples} to"
            f" {last.num_samples}, while the gain is {gain:.3g}; draw more proposals"
        )
    if joint.upper - joint.lower > allowed:
        found.append(
            f"wide: the bounds are {joint.upper - joint.lower:.3g} apart, while the gain is"
            f" {gain:.3g}; draw more proposals"
        )
    if joint.share_past_pareto_k > _MANY:
        found.append(
            f"heavy weights: for {joint.share_past_pareto_k:.0%} of prefixes k-hat is past its"
            " threshold, so the bounds may be far off there; train the energy less or scale it down"
        )
    few = min(_TOO_FEW_EFFECTIVE, last.num_samples / 2)
    if joint.median_effective_sample_size < max(few, _FEW_EFFECTIVE * last.num_samples):
        found.append(
            f"few effective samples: {joint.median_effective_sample_size:.0f} of"
            f" {last.num_samples} for the median prefix; draw more proposals or scale the energy"
            " down"
        )
    if joint.share_outweighed > _MANY:
        found.append(
            f"out of reach: for {joint.share_outweighed:.0%} of prefixes the real continuation"
            " outweighs every proposal, so Z is probably too low and the perplexity flattered"
        )
    return found
