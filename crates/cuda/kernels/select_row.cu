// The entry point of the draws with filters: one block a draw.
#include "flash_sampling/select_row.cuh"

using namespace flash_sampling;

struct SelectRows {
    const float* logits;        // [rows, tokens] raw
    u64 row_stride;             // elements
    const u32* sources;         // [draws] the row of each draw; null = draw i takes row i
    const Row* rows;            // [draws]
    const RowFilters* filters;  // [draws]; all off: the draw stays
    Draw* draws;                // [draws] without filters, and then with them
    u32 first_token;
    u32 tokens;
    u32 is_transformed;         // the logits are not raw
    u32 padding;
};
FS_LAYOUT(SelectRows, 64,
          FS_AT(logits, 0) && FS_AT(row_stride, 8) && FS_AT(sources, 16) && FS_AT(rows, 24) && FS_AT(filters, 32) &&
          FS_AT(draws, 40) && FS_AT(first_token, 48) && FS_AT(tokens, 52) && FS_AT(is_transformed, 56) && FS_AT(padding, 60));

// What the host must know to launch it: dynamic shared memory in bytes, threads of a block.
extern "C" {
__constant__ u32 select_row_launch[2] = {sizeof(SelectRow::Shared), SelectRow::THREADS};
}

extern "C" __global__ void __launch_bounds__(SelectRow::THREADS, 2) select_row(const __grid_constant__ SelectRows call) {
    extern __shared__ __align__(16) u8 memory[];
    SelectRow::Shared& shared = *reinterpret_cast<SelectRow::Shared*>(memory);
    const u32 i = blockIdx.x;
    const RowFilters filters = call.filters[i];
    const Draw plain = call.draws[i];
    // What is invalid stays so.
    if (plain.status != Status::Drawn || !(filters.has_min_p() || filters.has_top_p() || filters.top_k)) return;
    const Row* const given = call.rows + i;
    copy_row(&shared.row, given);
    if (threadIdx.x == 96) shared.philox = RowPhilox::of(given->seed, given->position, given->draw, domain_code(Domain::Token));
    __syncthreads();
    if (call.is_transformed && threadIdx.x == 0) {
        shared.row.mask = nullptr;
        shared.row.biases = 0;
        shared.row.inv_temperature = 1.0f;
    }
    __syncthreads();
    const u32 source = call.sources ? call.sources[i] : i;
    const ExistingRow logits{call.logits + source * call.row_stride, call.first_token, call.tokens};
    SelectRow select{filters, logits, shared};
    const Draw draw = select.draw(plain);
    if (threadIdx.x == 0) call.draws[i] = draw;
}
