// The filters of a row that kernels support: min-p, top-k and top-p, in the orders of core's filters.rs.
#pragma once

#include "../abi.cuh"
#include "../summary/winner.cuh"

namespace flash_sampling {

struct RowFilters {
    double ln_min_p;  // -inf = off
    float top_p;      // 1 = off
    u32 top_k;        // 0 = off; at most 1024
    float rescale;    // factor from the logits of the filters to the logits of the draw
    u32 min_p_last;   // 0: min-p, top-k, top-p; 1: top-k, top-p, min-p

    FS_FUNCTION bool has_min_p() const { return ln_min_p > -1e300; }
    FS_FUNCTION bool has_top_p() const { return top_p < 1.0f; }
    FS_FUNCTION bool is_min_p_first() const { return has_min_p() && !min_p_last; }
    FS_FUNCTION bool is_any() const { return has_min_p() || has_top_p() || top_k; }
    // Whether top-p comes first, so that masses decide: top_p.cuh.
    FS_FUNCTION bool is_by_mass() const { return has_top_p() && !top_k && !is_min_p_first(); }
    // Whether min-p keeps only tokens at most 8 nats below the largest logit.
    FS_FUNCTION bool is_listed_by_min_p() const { return ln_min_p > -8.0 && !min_p_last; }
    FS_FUNCTION bool is_min_p_alone() const { return is_listed_by_min_p() && !top_k && !has_top_p(); }
    // Returns the distance from the largest logit down to min-p's limit, rounded up, for `dot_threshold`.
    FS_FUNCTION float min_p_cut() const { return static_cast<float>(-ln_min_p) * 1.000001f; }
    FS_FUNCTION bool is_listed() const { return is_listed_by_min_p() || top_k; }

    // Returns the smallest logit that min-p keeps: the sum, rounded up to float32.
    FS_FUNCTION float least(float largest) const {
        const double t = add_rn(static_cast<double>(largest), ln_min_p);
        const float x = static_cast<float>(t);
        return static_cast<double>(x) < t ? from_monotone_bits(to_monotone_bits(x) + 1) : x;
    }
};
FS_LAYOUT(RowFilters, 24,
          FS_AT(ln_min_p, 0) && FS_AT(top_p, 8) && FS_AT(top_k, 12) && FS_AT(rescale, 16) && FS_AT(min_p_last, 20));

}  // namespace flash_sampling
