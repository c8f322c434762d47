// From raw to transformed logits of one row: the twin of core's transform.rs. The order is mask, sparse bias, penalties,
// temperature.
#pragma once

#include "platform.cuh"

namespace flash_sampling {

// FS_NO_PENALTIES: no launch of the kernel has rows with penalties.
#ifdef FS_NO_PENALTIES
constexpr bool HAS_PENALTIES = false;
#else
constexpr bool HAS_PENALTIES = true;
#endif

struct LogitBias {
    u32 token;
    float value;
};
FS_LAYOUT(LogitBias, 8, FS_AT(token, 0) && FS_AT(value, 4));

// The penalties of a biased logit: the other part of core's Adjustment.
struct Penalty {
    float repetition;  // divides a positive logit and multiplies another; 1 = none
    float subtract;

    FS_FUNCTION float apply(float l) const {
        if (repetition != 1.0f) l = l > 0.0f ? div_rn(l, repetition) : mul_rn(l, repetition);
        return sub_rn(l, subtract);
    }
};
FS_LAYOUT(Penalty, 8, FS_AT(repetition, 0) && FS_AT(subtract, 4));

// A flag in the number of biases: penalties follow. The first has the smallest values of all, at most 1 and 0; then one per bias.
constexpr u32 PENALISED = 1u << 31;

struct RowTransform {
    const u32* mask;  // null = every token is allowed
    u32 mask_words;
    u32 biases;             // the number of biases, plus PENALISED if penalties follow
    const LogitBias* bias;  // tokens strictly ascending
    float inv_temperature;

    FS_FUNCTION u32 bias_count() const { return HAS_PENALTIES ? biases & ~PENALISED : biases; }
    FS_FUNCTION bool is_penalised() const { return HAS_PENALTIES && (biases & PENALISED); }
    FS_FUNCTION const Penalty* penalties() const { return reinterpret_cast<const Penalty*>(bias + bias_count()); }

    // Returns a logit with bias `at` and its penalty.
    FS_FUNCTION float adjust(float l, u32 at) const {
        l = add_rn(l, bias[at].value);
        return is_penalised() ? penalties()[1 + at].apply(l) : l;
    }

    FS_FUNCTION bool allows(u32 token) const {
        if (!mask) return true;
        return (token >> 5) < mask_words && (mask[token >> 5] >> (token & 31) & 1);
    }

    // Returns the index of a token's bias, or of the first larger token's bias.
    FS_FUNCTION u32 find_bias(u32 token) const {
        u32 low = 0, high = bias_count();
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
            if (at < bias_count() && bias[at].token == token) l = adjust(l, at);
        }
        return inv_temperature != 1.0f ? mul_rn(l, inv_temperature) : l;
    }
};

}  // namespace flash_sampling
