"""Which layers a claim gets: pure, deterministic, from the terms and what is assigned already.

A claim is a ceiling: a grant never needs more, and no claim is rewritten. Holes come first, from layer 0 up; then a replica where the
chain is thinnest. Ranges abut exactly, because a stage hands over whole ranges (see ``model.coverage``).

`min_stages` bounds a grant from above: the model is cut into that many parts of balanced cost, and no grant crosses a cut. So as many
ample workers get one part each, whatever they could hold. A node that names its own layers gets no more than those; for it
`min_stages` only keeps back one layer for each of the other stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

from tessella_p2p.base.errors import ClaimTooSmall, InvalidRequest, Overloaded
from tessella_p2p.base.ids import LayerRange
from tessella_p2p.model.coverage import walk
from tessella_p2p.orchestrator.terms import ModelTerms


def allocate(
    terms: ModelTerms,
    assigned: Iterable[LayerRange],
    claim_mb: int,
    *,
    min_stages: int = 1,
    wanted: LayerRange | None = None,
) -> LayerRange:
    """The range that a claim gets.

    Args:
        terms: of the model, under the worker's recipe, on its device.
        assigned: what other workers hold, ready or loading; a `Counter` says the same in less room.
        claim_mb: the memory that the worker declares.
        min_stages: into how many stages the model is to be split at least.
        wanted: the worker's own bound; the grant lies within it.

    Raises:
        ClaimTooSmall: not one layer fits; it says which claim would do.
        InvalidRequest: ``wanted`` is not within the model.
    """
    total = terms.total_layers
    scope = LayerRange(0, total) if wanted is None else wanted
    if scope.end > total:
        raise InvalidRequest(f"layers {scope} are not within the model's {total} layers", param="layers")
    if wanted is None:
        cuts = balanced_cuts(terms, min_stages)
    else:
        longest = max(1, total - (min(min_stages, total) - 1))
        cuts = (scope.start, min(scope.end, scope.start + longest), scope.end)
    held = Counter(assigned)  # a mesh of a thousand has a few ranges, many times
    holes = [hole for hole in walk(held, total).holes if hole.overlaps(scope)]
    segments = [part for hole in holes for part in _split(_intersection(hole, scope), cuts)]
    grant = _first_fit(terms, segments, claim_mb) or _replica(terms, held, scope, cuts, claim_mb, wanted is not None)
    if grant is None:
        needed = min(terms.claim_mb(LayerRange(layer, layer + 1)) for layer in scope)
        raise ClaimTooSmall(
            f"a claim of {claim_mb} MB cannot host one of the layers {scope}; {needed} MB is the least: raise vram_mb to that"
        )
    return grant


def allocate_copy(
    terms: ModelTerms,
    held: Iterable[LayerRange],
    copied: Sequence[LayerRange],
    claim_mb: int,
    *,
    wanted: LayerRange | None = None,
) -> LayerRange:
    """The range that a canary gets: exactly one that a worker holds, so that a copier has an answer to copy; it fills no hole.

    Args:
        terms: as for `allocate`.
        held: what workers hold.
        copied: what other canaries hold: the range with the fewest of them goes first, then the lowest.
        claim_mb: the memory that the canary declares.
        wanted: the canary's own bound.

    Raises:
        Overloaded: no worker holds a range within the bound yet.
        ClaimTooSmall: none of them fits; it says which claim would do.
    """
    ranges = {layers for layers in held if wanted is None or wanted.contains(layers)}
    if not ranges:
        raise Overloaded("a canary copies what another worker holds, and nobody holds such layers yet: try again later")
    num_copies = Counter(copied)
    fitting = [layers for layers in ranges if fits(terms, layers, claim_mb)]
    if not fitting:
        needed = min(terms.claim_mb(layers) for layers in ranges)
        raise ClaimTooSmall(f"a claim of {claim_mb} MB copies no range that is held here; {needed} MB is the least")
    return min(fitting, key=lambda layers: (num_copies[layers], layers))


def fits(terms: ModelTerms, layers: LayerRange, claim_mb: int) -> bool:
    """Whether ``layers`` need no more than the claim."""
    return terms.claim_mb(layers) <= claim_mb


@lru_cache(maxsize=256)
def balanced_cuts(terms: ModelTerms, parts: int) -> tuple[int, ...]:
    """Boundaries ``0 = c0 < c1 < … = total_layers`` of ``parts`` ranges, so that the costliest range is as cheap as it can be.

    From the tail up, each range takes what fits under the least possible maximum for what is left; so a heavy head gets few layers and
    the rest is balanced among themselves. More parts than layers give one layer each.
    """
    end = terms.total_layers
    cuts = [end]
    for left in range(min(parts, end), 1, -1):
        bound = _least_maximum(terms, end, left)
        start = end - 1
        while start > left - 1 and terms.cost(LayerRange(start - 1, end)) <= bound:
            start -= 1
        cuts.append(start)
        end = start
    return (0, *reversed(cuts))


def _least_maximum(terms: ModelTerms, end: int, parts: int) -> int:
    """The least cost under which ``[0, end)`` can be cut into at most ``parts`` ranges."""
    low = max(terms.cost(LayerRange(layer, layer + 1)) for layer in {0, end - 1})
    high = terms.cost(LayerRange(0, end))
    while low < high:
        middle = (low + high) // 2
        if _ranges_needed(terms, end, middle) <= parts:
            high = middle
        else:
            low = middle + 1
    return low


def _ranges_needed(terms: ModelTerms, end: int, bound: int) -> int:
    count, start = 1, 0
    for layer in range(1, end):
        if terms.cost(LayerRange(start, layer + 1)) > bound:
            count, start = count + 1, layer
    return count


def _first_fit(terms: ModelTerms, segments: Sequence[LayerRange], claim_mb: int) -> LayerRange | None:
    """The longest fitting prefix of the first segment that has one; then the same without layer 0 and its embedding."""
    for skip in (0, 1):
        for segment in segments:
            if len(segment) > skip:
                grant = _prefix(terms, LayerRange(segment.start + skip, segment.end), claim_mb)
                if grant is not None:
                    return grant
    return None


def _prefix(terms: ModelTerms, segment: LayerRange, claim_mb: int) -> LayerRange | None:
    """The longest prefix of ``segment`` that fits."""
    low, high = segment.start, segment.end
    while low < high:
        middle = (low + high + 1) // 2
        if fits(terms, LayerRange(segment.start, middle), claim_mb):
            low = middle
        else:
            high = middle - 1
    return LayerRange(segment.start, low) if low > segment.start else None


def _replica(
    terms: ModelTerms,
    held: Mapping[LayerRange, int],
    scope: LayerRange,
    cuts: tuple[int, ...],
    claim_mb: int,
    is_wanted: bool,
) -> LayerRange | None:
    """A second copy of the thinnest stretch that the claim can take over whole; else as much of one as fits."""
    if is_wanted:
        return _first_fit(terms, list(_split(scope, cuts)), claim_mb)
    edges = sorted({*cuts, *(r.start for r in held), *(r.end for r in held)})
    segments = [LayerRange(a, b) for a, b in pairwise(edges)]
    replicas = Counter({segment: sum(n for r, n in held.items() if r.contains(segment)) for segment in segments})
    segments.sort(key=lambda segment: (replicas[segment], segment.start))
    for segment in segments:
        if fits(terms, segment, claim_mb):
            end = segment.end
            for following in sorted(segments):
                if following.start != end or end in cuts or replicas[following] != replicas[segment]:
                    continue
                if not fits(terms, LayerRange(segment.start, following.end), claim_mb):
                    break
                end = following.end
            return LayerRange(segment.start, end)
    return _first_fit(terms, segments, claim_mb)


def _split(layers: LayerRange, cuts: tuple[int, ...]) -> tuple[LayerRange, ...]:
    """``layers`` in the parts between ``cuts``."""
    edges = [layers.start, *(cut for cut in cuts if layers.start < cut < layers.end), layers.end]
    return tuple(LayerRange(a, b) for a, b in pairwise(edges))


def _intersection(one: LayerRange, other: LayerRange) -> LayerRange:
    return LayerRange(max(one.start, other.start), min(one.end, other.end))
