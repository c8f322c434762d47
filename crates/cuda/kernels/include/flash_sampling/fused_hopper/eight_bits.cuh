// The products of a weight of 8-bit elements. Threads convert the elements in registers, to f16 or bf16 (see
// scaled_hidden.cuh). Each conversion is exact. The scale of a weight row then multiplies the sums of the row.
#pragma once

#include "../ptx/mma.cuh"
#include "../quantised.cuh"
#include "multiply.cuh"

namespace flash_sampling::fused_hopper {

// Copies the factors of the hidden states to shared memory. Columns without a row get the factor 1.
template <class Shared>
__device__ __forceinline__ void prepare_factors(const Call& call, const float* factors, Shared& shared, u32 columns,
                                                u32 worker, u32 workers) {
    for (u32 i = worker; i < columns; i += workers) shared.factors[i] = i < call.row_count ? factors[i] : 1.0f;
}

// Returns whether every row of the batch is exact in f16.
template <class T>
__device__ __forceinline__ bool is_exact_in_f16(const Consumer<T>& self) {
    bool is_exact = true;
    for (u32 i = self.lane; i < T::COLUMNS; i += 32) is_exact &= self.shared.factors[i] > 0.0f;
    return __all_sync(0xffffffffu, is_exact);
}

// Loads a thread's operands of two products, of 16 columns each, and converts them to OPERAND. For each product, a
// thread loads four consecutive elements of each of two weight rows, in the order of HiddenScaler::permuted_index.
// `address` is the argument of load_matrices.
template <Element WEIGHT, ptx::Operand OPERAND>
__device__ __forceinline__ void load_operands(u32 (&first)[4], u32 (&second)[4], u32 address) {
    const auto low = [](u32 word) {
        return OPERAND == ptx::Operand::F16 ? bytes_to_f16<WEIGHT, false>(word) : bytes_to_bf16<WEIGHT, false>(word);
    };
    const auto high = [](u32 word) {
        return OPERAND == ptx::Operand::F16 ? bytes_to_f16<WEIGHT, true>(word) : bytes_to_bf16<WEIGHT, true>(word);
    };
    u32 words[4];
    ptx::load_matrices(words, address);
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
        first[half] = low(words[half]), first[half + 2] = high(words[half]);
        second[half] = low(words[half + 2]), second[half + 2] = high(words[half + 2]);
    }
}

// Warpgroups queue their products in turn. `give_turn` starts the turn of a warpgroup, which waits in `await_turn`.
__device__ __forceinline__ void await_turn(u32 group) { ptx::named_barrier(TURN_BARRIER + group, TURN_THREADS); }
__device__ __forceinline__ void give_turn(u32 to_group) { ptx::named_arrive(TURN_BARRIER + to_group, TURN_THREADS); }

// Multiplies as multiply() does, but threads convert the elements of the weight. While the tensor cores multiply for
// one warpgroup, the threads of other warpgroups convert their next elements.
template <ptx::Operand OPERAND, class T>
__device__ __forceinline__ void multiply_converted(float (&d)[T::ACCUMULATORS], const u8* stages, Ring<T>& ring,
                                                   u32 steps, const Consumer<T>& self) {
    static_assert(!T::SKIPS, "every warp releases every stage");
    constexpr u32 CHUNKS = T::SLAB_ROW_BYTES / 16;  // chunks of 16 bytes in a slab's row; each product takes one
    const u32 base = ptx::uniform(ptx::shared_address(stages));
    const u32 hidden = ptx::operand_address(base + T::WEIGHT_BYTES);
    const u32 empty = ptx::cluster_address(&self.shared.empty[0], self.lane % T::CLUSTER);
    // The offset, within a slab, of the chunk that the lane passes to load_matrices for chunks 0 and 1 of 16 rows.
    // Lanes 0 to 15 pass chunk 0 of a row each; the other lanes pass chunk 1. Swizzling permutes the chunks of a row,
    // so the offset for chunks k and k + 1 is `offset ^ k * 16`.
    const u32 row = self.slab() + self.lane % 16;
    const u32 offset = row * T::SLAB_ROW_BYTES + (self.lane / 16 ^ self.lane % 8) * 16;
    u32 a[CHUNKS][4];
#pragma unroll 1
    for (u32 step = 0; step < steps; ++step) {
        const u32 stage = ring.stage;
        ptx::mbarrier_wait(&self.shared.full[stage], ring.phase);
        const u32 weight = base + stage * T::STAGE_BYTES;
        const u64 b = ptx::operand_descriptor(hidden + stage * T::STAGE_BYTES);
#pragma unroll
        for (u32 slab = 0; slab < T::SLABS; ++slab) {
#pragma unroll
            for (u32 k = 0; k < CHUNKS; k += 2)
                load_operands<T::WEIGHT, OPERAND>(a[k], a[k + 1], weight + slab * T::SLAB_BYTES + (offset ^ k * 16));
            if (T::IN_TURN) await_turn(self.group);
            ptx::wgmma_fence();
#pragma unroll
            for (u32 k = 0; k < CHUNKS; ++k) {
                const u64 place = (slab * T::SLAB_BYTES + k / 4 * T::PART_BYTES) / 16 + k % 4 * ptx::DESCRIPTOR_STEP;
                ptx::WgmmaRegisters<T::COLUMNS, OPERAND>::multiply(d, a[k], b + place, slab + k > 0 || step > 0);
            }
            ptx::wgmma_commit();
            if (T::IN_TURN) give_turn((self.group + 1) % T::TILE_UNITS);
            ptx::wgmma_wait<0>();
        }
        if (self.lane < T::CLUSTER) ptx::mbarrier_arrive_cluster(empty + stage * sizeof(u64));
        ring.advance();
    }
}

// Multiplies a tile, and multiplies the sums by the scales of weight rows. `is_f16` states whether the stages hold the
// hidden states in f16. If so, the function also multiplies the sums by the factors of the hidden states.
template <class T>
__device__ __forceinline__ void multiply_eight_bits(float (&d)[T::ACCUMULATORS], const u8* stages, Ring<T>& ring,
                                                    u32 steps, const Consumer<T>& self, const WeightScales& scales,
                                                    bool is_f16) {
    // Loads the scales before the products, so that the products hide the latency.
    const u32 m = self.slab() + self.lane / 4;
    const float scale[2] = {m < self.size ? scales.row_scale(self.first + m) : 1.0f,
                            m + 8 < self.size ? scales.row_scale(self.first + m + 8) : 1.0f};
    if (is_f16)
        multiply_converted<ptx::Operand::F16>(d, stages, ring, steps, self);
    else
        multiply_converted<ptx::Operand::BF16>(d, stages, ring, steps, self);
#pragma unroll
    for (u32 j = 0; j < T::ACCUMULATORS / 4; ++j) {
        const float2 factor = self.pair(self.shared.factors, j);
#pragma unroll
        for (u32 e = 0; e < 4; ++e) {
            const float sum = is_f16 ? mul_rn(d[4 * j + e], e & 1 ? factor.y : factor.x) : d[4 * j + e];
            d[4 * j + e] = mul_rn(sum, scale[e / 2]);
        }
    }
}

}  // namespace flash_sampling::fused_hopper
