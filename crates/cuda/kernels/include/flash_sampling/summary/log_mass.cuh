// Streaming log-sum-exp: the twin of core's log_mass.rs.
#pragma once

#include "../platform.cuh"

namespace flash_sampling {

// The log-mass of a set as a reference logit and a sum relative to it (Milakov & Gimelshein 2018).
struct LogMass {
    float max;
    double sum;

    FS_FUNCTION static LogMass empty() { return {-f32_infinity(), 0.0}; }
    FS_FUNCTION static LogMass of(float logit) { return logit == -f32_infinity() ? empty() : LogMass{logit, 1.0}; }
    FS_FUNCTION bool is_empty() const { return sum == 0.0; }

    FS_FUNCTION LogMass merge(const LogMass& other) const {
        // Copies of the values, because references would force them into memory.
        const bool is_high = max >= other.max;
        const float high = is_high ? max : other.max, low = is_high ? other.max : max;
        const double high_sum = is_high ? sum : other.sum, low_sum = is_high ? other.sum : sum;
        if (low_sum == 0.0) return {high, high_sum};
        const double scale = ::exp(static_cast<double>(low) - static_cast<double>(high));
        return {high, add_rn(high_sum, mul_rn(low_sum, scale))};
    }

    FS_FUNCTION double value() const { return static_cast<double>(max) + ::log(sum); }

    // Returns e^L_B / (e^L_A + e^L_B), with this mass as A.
    FS_FUNCTION double replace_probability(const LogMass& b) const {
        if (b.is_empty()) return 0.0;
        if (is_empty()) return 1.0;
        const double ratio = sum / b.sum * ::exp(static_cast<double>(max) - static_cast<double>(b.max));
        return 1.0 / (1.0 + ratio);
    }
};

}  // namespace flash_sampling
