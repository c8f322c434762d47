// The summary of a group of the vocabulary, and the binary merge: the twin of core's group_summary.rs.
#pragma once

#include "log_mass.cuh"
#include "winner.cuh"

namespace flash_sampling {

// A log-mass and an exact local sample (paper section D.1).
struct GroupSummary {
    LogMass mass;
    Candidate sample;

    FS_FUNCTION static GroupSummary empty() { return {LogMass::empty(), Candidate::none()}; }
    FS_FUNCTION bool takes(const LogMass& b, double coin) const { return coin < mass.replace_probability(b); }
    // Keeps B's sample with probability e^L_B / (e^L_A + e^L_B) (Lemma D.3).
    FS_FUNCTION GroupSummary merge(const GroupSummary& b, double coin) const {
        return {mass.merge(b.mass), takes(b.mass, coin) ? b.sample : sample};
    }
};

}  // namespace flash_sampling
