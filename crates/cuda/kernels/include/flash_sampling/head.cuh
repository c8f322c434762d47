// From dot products to raw logits: the twin of core's head.rs. The order is bias, soft-cap, scale.
#pragma once

#include "math.cuh"

namespace flash_sampling {

struct HeadTransform {
    float soft_cap;  // 0 = none
    float scale;

    FS_FUNCTION float apply(float dot, float bias, bool has_bias) const {
        float l = has_bias ? add_rn(dot, bias) : dot;
        if (soft_cap != 0.0f && is_finite(l)) l = mul_rn(soft_cap, tanh(div_rn(l, soft_cap)));
        return scale != 1.0f ? mul_rn(l, scale) : l;
    }
};
FS_LAYOUT(HeadTransform, 8, FS_AT(soft_cap, 0) && FS_AT(scale, 4));

}  // namespace flash_sampling
