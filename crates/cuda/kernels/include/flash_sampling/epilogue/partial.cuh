// A block's summary of one group of one row: the scratch between the two kernels of the grouped and online variants.
//
// Groups are on the absolute grid of multiples of their size. A block's run of tokens is contiguous, so it overlaps contiguous
// groups, and neighbouring blocks share at most the group at their border. Hence each pair (block b, group k) has its own slot b
// + k - (the first group), and groups + blocks slots per row are enough.
#pragma once

#include "../mainloop/dot_tile.cuh"
#include "../summary/group_summary.cuh"

namespace flash_sampling {

struct Partial {
    double sum;  // of e^(logit - max); 0 = no token has mass
    float max;   // the lower edge of the largest logit's bin, as in core's mass histogram
    float score;
    u32 token;
    float logit;

    FS_FUNCTION static Partial of(const GroupSummary& summary) {
        const Candidate& sample = summary.sample;
        return {summary.mass.sum, summary.mass.max, sample.winner.score, sample.winner.token, sample.logit};
    }
    FS_FUNCTION LogMass mass() const { return {max, sum}; }
    FS_FUNCTION Candidate sample() const { return {{score, token}, logit}; }
};
static_assert(sizeof(Partial) == 24, "the host allocates this size");

// The groups of a launch and their blocks.
struct Groups {
    static constexpr u32 GRANULE = 64;  // runs of blocks begin and end at multiples of it

    u32 size;         // tokens of a group
    u32 first_token;  // global id of the launch's first token
    u32 tokens;       // of the launch
    u32 blocks;       // at most one block per granule of tokens

    FS_FUNCTION u32 first() const { return first_token / size; }
    FS_FUNCTION u32 count() const { return tokens ? (first_token + tokens - 1) / size - first() + 1 : 0; }
    FS_FUNCTION u32 slots() const { return count() + blocks; }
    FS_FUNCTION u32 slot(u32 block, u32 group) const { return block + (group - first()); }

    // Computes the blocks that overlap a group: the first block, and the end of the range.
    FS_FUNCTION void blocks_of(u32 group, u32& from, u32& to) const {
        const u32 before = group * size;
        const u32 start = before > first_token ? before - first_token : 0;
        const u32 rest = tokens - 1 - start;
        const u32 left = size - (first_token + start - before);
        from = Run::owner(blocks, tokens, GRANULE, start);
        to = Run::owner(blocks, tokens, GRANULE, start + (left - 1 < rest ? left - 1 : rest)) + 1;
    }
};
FS_LAYOUT(Groups, 16, FS_AT(size, 0) && FS_AT(first_token, 4) && FS_AT(tokens, 8) && FS_AT(blocks, 12));

}  // namespace flash_sampling
