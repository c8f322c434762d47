// The instructions of the portable kernel on the processor: hopper_ptx.hpp includes this file. Copies complete at once, and products
// are sums in ascending order.
#pragma once

namespace flash_sampling::ptx {

inline void copy_async(u32 to, const void* from, u32 bytes, bool is_wanted, u64) {
    if (!is_wanted) return;
    memcpy(shared_memory + to, from, bytes);
    memset(shared_memory + to + bytes, 0, 16 - bytes);
}
inline void copy_async_commit() {}
template <int PENDING>
void copy_async_wait() {}

inline void load_matrices(u32 (&r)[4], u32 address) {
    const u32 lane = threadIdx.x % 32;
    const unsigned long long* const rows = emulator::exchange(address);
    for (u32 m = 0; m < 4; ++m) memcpy(&r[m], shared_memory + rows[m * 8 + lane / 4] + lane % 4 * 4, 4);
}

// Adds the products of the elements of two words.
inline void add_products(float& sum, u32 a, u32 b) {
    sum += bits_to_f32(a << 16) * bits_to_f32(b << 16);
    sum += bits_to_f32(a & 0xffff0000u) * bits_to_f32(b & 0xffff0000u);
}
inline void add_products(i32& sum, u32 a, u32 b) {
    for (u32 i = 0; i < 32; i += 8) sum += static_cast<signed char>(a >> i) * static_cast<signed char>(b >> i);
}

template <Operand T, class Sum>
void multiply(Sum (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    static_assert(T != Operand::F16, "the emulated elements are bf16 and 8-bit integers");
    const u32 lane = threadIdx.x % 32;
    const u64 pairs[3] = {static_cast<u64>(a[1]) << 32 | a[0], static_cast<u64>(a[3]) << 32 | a[2], static_cast<u64>(b1) << 32 | b0};
    u64 lanes[3][32];
    for (u32 i = 0; i < 3; ++i) memcpy(lanes[i], emulator::exchange(pairs[i]), sizeof(lanes[i]));
    for (u32 e = 0; e < 4; ++e)
        for (u32 word = 0; word < 8; ++word) {
            const u64 of_row = lanes[word / 4][lane / 4 * 4 + word % 4] >> (e / 2 * 32);
            const u64 of_column = lanes[2][(lane % 4 * 2 + e % 2) * 4 + word % 4] >> (word / 4 * 32);
            add_products(d[e], static_cast<u32>(of_row), static_cast<u32>(of_column));
        }
}

}  // namespace flash_sampling::ptx
