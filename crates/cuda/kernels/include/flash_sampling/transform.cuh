// From raw to transformed logits, for what needs one row only: the twin of core's transform.rs.
// The order is mask, sparse bias, temperature.
#pragma once

#include "platform.cuh"

namespace flash_sampling {

struct LogitBias {
    u32 token;
    float value;
};
FS_LAYOUT(LogitBias, 8, FS_AT(token, 0) && FS_AT(value, 4));

struct RowTransform {
    const u32* mask;  // null = every token is allowed
    u32 mask_words;
    u32 biases;
    const LogitBias* bias;  // tokens strictly ascending
    float inv_temperature;

    FS_FUNCTION bool allows(u32 token) const {
        if (!mask) return true;
        return (token >> 5) < mask_words && (mask[token >> 5] >> (token & 31) & 1);
    }

    // The place of a token among the biases, or of the first larger one.
    FS_FUNCTION u32 find_bias(u32 token) const {
        u32 low = 0, high = biases;
        while (low < high) {
            const u32 middle = (low + high) / 2;
            if (bias[middle].token < token) low = middle + 1; else high = middle;
        }
        return low;
    }

    FS_FUNCTION float apply(float raw, u32 token) const {
        float l = allows(token) ? raw : -f32_infinity();
        if (biases) {
            const u32 at = find_bias(token);
            if (at < biases && bias[at].token == token) l = add_rn(l, bias[at].value);
        }
        return inv_temperature != 1.0f ? mul_rn(l, inv_temperature) : l;
    }
};

}  // namespace flash_sampling
