// Copies 16-bit logits as float32 for the kernels of filters, which read float32. Rows without filters are not copied
// if the call has filters.
#include "flash_sampling/element.cuh"
#include "flash_sampling/selection/row_filters.cuh"

using namespace flash_sampling;

constexpr u32 THREADS = 256;
constexpr u32 EACH = 8;  // tokens of a thread

struct WidenRows {
    const void* logits;         // [rows, tokens]
    const u32* sources;         // [draws] the row of each draw; null = draw i takes row i
    const RowFilters* filters;  // [draws]; null = all rows are copied
    float* copies;              // [draws, tokens]
    u64 row_stride;             // elements
    u64 copy_stride;            // elements
    Element element;
    u32 tokens;
};
FS_LAYOUT(WidenRows, 56,
          FS_AT(logits, 0) && FS_AT(sources, 8) && FS_AT(filters, 16) && FS_AT(copies, 24) && FS_AT(row_stride, 32) &&
          FS_AT(copy_stride, 40) && FS_AT(element, 48) && FS_AT(tokens, 52));

// blockIdx.y is the draw.
extern "C" __global__ void __launch_bounds__(THREADS) widen_rows(const __grid_constant__ WidenRows call) {
    const u32 draw = blockIdx.y, first = blockIdx.x * THREADS * EACH + threadIdx.x;
    if (call.filters && !call.filters[draw].is_any()) return;
    const u64 row = (call.sources ? call.sources[draw] : draw) * call.row_stride;
    float* const copy = call.copies + draw * call.copy_stride;
#pragma unroll
    for (u32 i = 0; i < EACH; ++i) {
        const u32 t = first + i * THREADS;
        if (t < call.tokens) copy[t] = element(call.element, call.logits, row + t);
    }
}
