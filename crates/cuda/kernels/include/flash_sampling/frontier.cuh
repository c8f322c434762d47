// The winner above every threshold at once: the rule of core's frontier.rs, for lists kept in shared memory.
#pragma once

#include "winner.cuh"

namespace flash_sampling {

// Whether a makes b superfluous: at every threshold that admits b, a is admitted and wins.
FS_FUNCTION bool covers(const Candidate& a, const Candidate& b) {
    const bool same = a.winner.score == b.winner.score && a.winner.token == b.winner.token;
    return a.logit >= b.logit && (same || a.winner.beats(b.winner));
}

// Offers a candidate to a list of `length` points (logits falling, winners rising) with room for `capacity`.
// Returns the new length; `capacity + 1` says that the list is full and the candidate was not taken.
FS_FUNCTION u32 push_frontier(Candidate* points, u32 length, u32 capacity, const Candidate& candidate) {
    u32 kept = 0;
    u32 place = 0;
    for (u32 i = 0; i < length; ++i) {
        const Candidate point = points[i];
        if (covers(point, candidate)) return length;
        if (covers(candidate, point)) continue;
        points[kept++] = point;
        if (point.logit >= candidate.logit) place = kept;
    }
    if (kept == capacity) return capacity + 1;
    for (u32 i = kept; i > place; --i) points[i] = points[i - 1];
    points[place] = candidate;
    return kept + 1;
}

}  // namespace flash_sampling
