// The second pass of the grouped and online variants (paper Alg. I.2 and I.3): from the groups' log-masses and samples to the
// draw of a row.
//
//   fresh    the sample of the group with the largest log-mass + own Gumbel noise
//   online   groups in ascending order; with A all previous groups, group B replaces A's sample with probability
//            e^L_B / (e^L_A + e^L_B)
//   maxima   the best of the groups' samples: the tiled draw
//
// A block handles a row. The online rule looks sequential, but its result is the sample of the last group that replaces. Whether
// a group replaces depends only on its mass, its coin and the mass of all previous groups: a prefix sum. A head may arrive in
// several launches, in ascending order; `Running` is the state between them.
#pragma once

#include "../epilogue/partial.cuh"
#include "../perturb.cuh"

namespace flash_sampling {

enum class Rule : u32 { Fresh = 0, Online = 1, Maxima = 2 };

// The state of a row after some of its groups.
struct Running {
    GroupSummary summary;
    double score;  // of the best group, for the fresh rule

    FS_FUNCTION static Running empty() { return {GroupSummary::empty(), -static_cast<double>(f32_infinity())}; }
};
static_assert(sizeof(Running) == 40, "the host allocates this size");

// The parameters of a launch.
struct Selection {
    const Row* rows;          // [row_count]
    const Partial* partials;  // [row_count, slots]
    Running* running;         // [row_count]; unused if one launch handles the whole head
    u64* invalid;             // [row_count] first invalid logit; all ones between calls
    Draw* draws;              // [row_count]
    double* log_z;            // [row_count], or null
    Groups groups;
    u32 row_count;
    Rule rule;
    u32 begins;  // 1 = the launch has the head's first tokens
    u32 ends;    // 1 = the launch has the head's last tokens
};
FS_LAYOUT(Selection, 80,
          FS_AT(rows, 0) && FS_AT(partials, 8) && FS_AT(running, 16) && FS_AT(invalid, 24) && FS_AT(draws, 32) &&
          FS_AT(log_z, 40) && FS_AT(groups, 48) && FS_AT(row_count, 64) && FS_AT(rule, 68) && FS_AT(begins, 72) &&
          FS_AT(ends, 76));

#ifdef __CUDACC__

struct Select {
    static constexpr u32 THREADS = 256;

    struct Shared {
        LogMass mass[THREADS];
        double score[THREADS];
        u32 group[THREADS];
    };

    static constexpr u32 NO_GROUP = 0xffffffffu;

    const Selection& call;
    const Row& row;
    const Partial* partials;
    Shared& shared;

    // Returns the mass of a group, merged over its blocks in ascending order.
    __device__ __forceinline__ LogMass mass_of(u32 group) const {
        u32 from, to;
        call.groups.blocks_of(group, from, to);
        LogMass mass = LogMass::empty();
        for (u32 block = from; block < to; ++block) mass = mass.merge(partials[call.groups.slot(block, group)].mass());
        return mass;
    }

    __device__ __forceinline__ Candidate sample_of(u32 group) const {
        u32 from, to;
        call.groups.blocks_of(group, from, to);
        Candidate sample = Candidate::none();
        for (u32 block = from; block < to; ++block)
            sample = sample.merge(partials[call.groups.slot(block, group)].sample());
        return sample;
    }

    // Returns the mass of `before` and of all previous threads. `all` gets the mass of `before` and of all threads.
    __device__ __forceinline__ LogMass prefix_masses(LogMass mine, LogMass before, LogMass& all) {
        const u32 thread = threadIdx.x;
        if (thread == 0) mine = before.merge(mine);
        shared.mass[thread] = mine;
        __syncthreads();
        for (u32 step = 1; step < THREADS; step *= 2) {
            if (thread >= step) mine = shared.mass[thread - step].merge(mine);
            __syncthreads();
            shared.mass[thread] = mine;
            __syncthreads();
        }
        all = shared.mass[THREADS - 1];
        return thread == 0 ? before : shared.mass[thread - 1];
    }

    // Returns the group with the largest score, or the lower group if scores are equal, and its score.
    __device__ __forceinline__ u32 best_group(double& score, u32 group) {
        const u32 thread = threadIdx.x;
        shared.score[thread] = score;
        shared.group[thread] = group;
        __syncthreads();
        for (u32 step = THREADS / 2; step; step /= 2) {
            if (thread < step) {
                const double other = shared.score[thread + step];
                const u32 others = shared.group[thread + step];
                const double mine = shared.score[thread];
                if (other > mine || (other == mine && others < shared.group[thread])) {
                    shared.score[thread] = other;
                    shared.group[thread] = others;
                }
            }
            __syncthreads();
        }
        score = shared.score[0];
        return shared.group[0];
    }

    __device__ __forceinline__ void block(u32 index) {
        const u32 count = call.groups.count(), first = call.groups.first(), thread = threadIdx.x;
        const u32 from = static_cast<u32>(static_cast<u64>(count) * thread / THREADS);
        const u32 to = static_cast<u32>(static_cast<u64>(count) * (thread + 1) / THREADS);
        Running running = call.begins ? Running::empty() : call.running[index];
        const Noise noise{row.seed, row.position};
        // A greedy row takes the argmax in every variant.
        const Rule rule = row.greedy ? Rule::Maxima : call.rule;

        const double lowest = -static_cast<double>(f32_infinity());
        LogMass mine = LogMass::empty();
        double score = lowest;
        u32 chosen = NO_GROUP;
        for (u32 i = from; i < to; ++i) {
            const LogMass mass = mass_of(first + i);
            mine = mine.merge(mass);
            if (mass.is_empty() || rule == Rule::Online) continue;
            // A float converts to a double exactly, so the comparison of maxima is exact.
            const double offer = rule == Rule::Fresh ? mass.value() + noise.gumbel(Domain::Group, row.draw, first + i)
                                                     : static_cast<double>(sample_of(first + i).winner.score);
            if (offer > score) score = offer, chosen = first + i;
        }
        LogMass all;
        LogMass before = prefix_masses(mine, running.summary.mass, all);
        if (rule == Rule::Online) {
            for (u32 i = from; i < to; ++i) {
                const LogMass mass = mass_of(first + i);
                if (GroupSummary{before, Candidate::none()}.takes(mass, noise.coin(row.draw, first + i)))
                    score = first + i, chosen = first + i;
                before = before.merge(mass);
            }
        }
        chosen = best_group(score, chosen);
        if (thread) return;

        Candidate& sample = running.summary.sample;
        if (chosen != NO_GROUP) {
            const Candidate found = sample_of(chosen);
            if (rule == Rule::Maxima)
                sample = sample.merge(found);
            else if (rule == Rule::Online || score > running.score)
                sample = found, running.score = score;
        }
        running.summary.mass = all;
        if (!call.ends) {
            call.running[index] = running;
            return;
        }
        const u64 best = sample.winner.is_none() ? 0 : to_ordered_bits(sample.winner);
        call.draws[index] = conclude(best, call.invalid[index], sample.logit);
        if (call.log_z) call.log_z[index] = all.value();
        call.invalid[index] = ~0ull;
    }
};

#endif

}  // namespace flash_sampling
